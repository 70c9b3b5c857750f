"""Count the parameters of a model's layers by kind, based on its configuration."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom_tools.sizing.compressed import FINE_RATIO, has_compressed_cache
from vllm_headroom_tools.sizing.config_fields import (
    ATTENTION_HEADS,
    EXPERT_COUNT,
    EXPERT_INPUTS,
    EXPERTS_PER_TOKEN,
    HIDDEN_SIZE,
    KV_SHARING_LAYERS,
    MAMBA_2_HEADS,
    MLP_WIDTH,
    MODEL_LENGTH,
    Config,
    read_integer,
    read_mapping,
    require_integer,
)
from vllm_headroom_tools.sizing.layers import (
    CACHELESS_KINDS,
    STATEFUL_KINDS,
    WINDOWED_KINDS,
    KvHeads,
    StateSizes,
    read_state_sizes,
)
from vllm_headroom_tools.sizing.quantisation import match_matrix_bytes, match_unquantised
from vllm_headroom_tools.sizing.sparse import SparseIndex, read_sparse_index

NOT_GATED: Final = frozenset(
    {
        "arcee",
        "bert",
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "mpt",
        "nemotron",
        "nemotron_h",
        "opt",
        "persimmon",
        "phi",
        "roberta",
        "starcoder2",
        "xlm-roberta",
    }
)
"""Model types whose MLP has two matrices instead of three."""

UNGIVEN_WIDTH_RATIO: Final = 4
"""The MLP width as a multiple of the hidden size. It is used for a model in NOT_GATED without a
width.
"""

LEARNED_POSITIONS: Final = frozenset(
    {"gpt2", "gpt_bigcode", "opt", "bert", "roberta", "xlm-roberta"}
)
"""Model types that have a learned vector per position instead of rotary embeddings."""

COUNTED_STATES: Final = frozenset(
    {"linear_num_value_heads", "linear_attn_config", "mamba_dt_rank", *MAMBA_2_HEADS}
)
"""Fields that identify models whose state projections can be counted here."""

UNCOUNTED_FIELDS: Final = (
    "ffn_config",
    "conv_L_cache",
    "use_double_wide_mlp",
    "zero_expert_num",
)
"""Fields that identify models whose layers differ in a way that is not counted here."""

EXPERTS: Final = ".experts."
"""A substring in the names of all expert matrices. Only some tokens pass through these matrices."""

ROW_PARALLEL: Final = ("o_proj", "down_proj", "out_proj")
"""Name suffixes of the matrices whose inputs are divided by tensor parallelism. For all other
matrices, the outputs are divided.
"""


class Matrix(Struct, frozen=True, kw_only=True):
    """A weight matrix of a model, named after its module."""

    name: str
    inputs: int
    outputs: int
    # The number of identical matrices with this name, such as those of a layer's experts.
    copies: int = 1
    # Whether quantisation and adapters skip the matrix, as with embeddings, routers and states.
    is_exempt: bool = False

    @property
    def parameters(self) -> int:
        """Return the number of parameters in all copies of the matrix."""
        return self.inputs * self.outputs * self.copies


def list_matrices(
    config: Config, kinds: Sequence[str], full_heads: KvHeads, windowed_heads: KvHeads
) -> tuple[Matrix, ...] | None:
    """Return all matrices of layers of these kinds, excluding the token embeddings.

    Returns None if the layers are not supported. Also returns None if a size is missing that every
    model needs. Raises ValueError if a size that only some models need is missing.
    """
    hidden_size = read_integer(config, *HIDDEN_SIZE)
    attention_heads = read_integer(config, *ATTENTION_HEADS)
    if hidden_size is None or attention_heads is None:
        return None
    has_width = read_mlp_width(config) is not None or "block_configs" in config
    if not has_width and read_integer(config, *EXPERT_COUNT) is None:
        return None
    if any(config.get(name) for name in UNCOUNTED_FIELDS):
        return None
    state = read_state_sizes(config) if COUNTED_STATES & set(config) else None
    if state is None and not STATEFUL_KINDS.isdisjoint(kinds):
        return None

    matrices = [
        *_list_positions(config, hidden_size),
        *_list_gemma_3n(config, hidden_size, len(kinds)),
    ]
    index = read_sparse_index(config, len(kinds))
    is_compressed = has_compressed_cache(config)
    # The last layers may use keys and values from earlier layers (Gemma 3n).
    first_sharing_layer = len(kinds) - (read_integer(config, *KV_SHARING_LAYERS) or 0)
    for layer, kind in enumerate(kinds):
        layer_name = f"layers.{layer}."
        if kind in STATEFUL_KINDS and state is not None:
            matrices += _list_state(config, f"{layer_name}mixer.", hidden_size, state)
        elif kind not in CACHELESS_KINDS:
            attention_name = f"{layer_name}self_attn."
            kv_heads = windowed_heads if kind in WINDOWED_KINDS else full_heads
            if is_compressed:
                matrices += _list_compressed_attention(config, attention_name, hidden_size, layer)
                attention = []
            else:
                attention = _list_attention(
                    config, attention_name, hidden_size, attention_heads, kv_heads
                )
            if layer >= first_sharing_layer:
                attention = _drop_keys_and_values(attention)
            matrices += attention
            has_index = index is not None and layer < len(index.layers) and index.layers[layer]
            if index is not None and has_index and not is_compressed:
                matrices += _list_index(config, attention_name, hidden_size, index)
        matrices += _list_layer_mlp(config, layer, kind, hidden_size)
    return tuple(matrices)


def _list_positions(config: Config, hidden_size: int) -> Iterator[Matrix]:
    """Yield the learned position vectors, if the model has any."""
    if str(config.get("model_type")) in LEARNED_POSITIONS:
        positions = read_integer(config, *MODEL_LENGTH) or 0
        yield Matrix(name="positions", inputs=positions, outputs=hidden_size, is_exempt=True)


def _list_layer_mlp(config: Config, layer: int, kind: str, hidden_size: int) -> Iterator[Matrix]:
    """Yield the matrices of a layer's experts or dense MLP, if it has either."""
    if not _has_mlp(config, kind):
        return
    name = f"layers.{layer}.mlp."
    if _has_experts(config, layer, kind):
        yield from _list_experts(config, name, hidden_size)
    else:
        yield from _list_dense_mlp(config, name, hidden_size, layer)


def _list_gemma_3n(config: Config, hidden_size: int, layer_count: int) -> Iterator[Matrix]:
    """Yield the matrices that only Gemma 3n has, or nothing for other models.

    The matrices are an embedding per token and layer, and the alternating updates. The source is
    vLLM 0.32, models/gemma3n.py.
    """
    embedding_width = read_integer(config, "hidden_size_per_layer_input")
    if embedding_width is not None:
        vocabulary = read_integer(config, "vocab_size_per_layer_input", "vocab_size") or 0
        yield Matrix(
            name="per_layer_embeddings",
            inputs=vocabulary,
            outputs=layer_count * embedding_width,
            # The embedding is looked up rather than multiplied, so it is never quantised.
            is_exempt=True,
        )
        yield Matrix(
            name="per_layer_projections",
            inputs=hidden_size,
            outputs=embedding_width,
            copies=3 * layer_count,
            is_exempt=True,
        )
    streams = read_integer(config, "altup_num_inputs")
    if streams is not None:
        yield Matrix(
            name="altup_projections",
            inputs=hidden_size,
            outputs=hidden_size,
            copies=2 * (streams - 1),
            is_exempt=True,
        )
        yield Matrix(
            name="laurel",
            inputs=hidden_size,
            outputs=read_integer(config, "laurel_rank") or 0,
            copies=2 * layer_count,
        )


def count_side_values(config: Config, layer_count: int) -> int:
    """Return the number of values per token besides its hidden state (Gemma 3n, DeepSeek V4).

    These values are each layer's embedding, and the additional streams before and after a layer.
    Returns 0 for other models. Raises ValueError for a value that is not a size.
    """
    embedding_width = read_integer(config, "hidden_size_per_layer_input") or 0
    streams = read_integer(config, "altup_num_inputs", "hc_mult") or 1
    hidden_size = read_integer(config, *HIDDEN_SIZE) or 0
    return layer_count * embedding_width + 2 * (streams - 1) * hidden_size


# A layer's mixer, which is attention, latent attention or a state.


def _list_attention(
    config: Config, name: str, hidden_size: int, attention_heads: int, kv_heads: KvHeads
) -> list[Matrix]:
    """Return the projections of an attention layer, including latent attention."""
    latent_width = read_integer(config, "kv_lora_rank")
    if latent_width is not None:
        return list(
            _list_latent_attention(config, name, hidden_size, attention_heads, latent_width)
        )
    query_width = attention_heads * kv_heads.key_size
    if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next":
        # Each query has a gate of the same size (transformers, qwen3_next).
        query_width *= 2
    key_width = kv_heads.count * kv_heads.key_size
    value_width = kv_heads.count * kv_heads.value_size
    output_width = attention_heads * kv_heads.value_size
    return [
        Matrix(name=f"{name}q_proj", inputs=hidden_size, outputs=query_width),
        Matrix(name=f"{name}k_proj", inputs=hidden_size, outputs=key_width),
        Matrix(name=f"{name}v_proj", inputs=hidden_size, outputs=value_width),
        Matrix(name=f"{name}o_proj", inputs=output_width, outputs=hidden_size),
    ]


def _drop_keys_and_values(attention: Sequence[Matrix]) -> list[Matrix]:
    """Return a layer's projections except those for keys and values.

    This applies to layers that read the KV cache of an earlier layer (Gemma 3n).
    """
    return [matrix for matrix in attention if not matrix.name.endswith(("k_proj", "v_proj"))]


def _list_latent_attention(
    config: Config, name: str, hidden_size: int, attention_heads: int, latent_width: int
) -> Iterator[Matrix]:
    """Yield the projections of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    rotary_size = read_integer(config, "qk_rope_head_dim") or 0
    query_latent_width = read_integer(config, "q_lora_rank")
    plain_size = require_integer(config, "qk_nope_head_dim")
    value_size = require_integer(config, "v_head_dim")
    query_width = attention_heads * (plain_size + rotary_size)
    if query_latent_width is None:
        yield Matrix(name=f"{name}q_proj", inputs=hidden_size, outputs=query_width)
    else:
        yield Matrix(name=f"{name}q_a_proj", inputs=hidden_size, outputs=query_latent_width)
        yield Matrix(name=f"{name}q_b_proj", inputs=query_latent_width, outputs=query_width)
    # One matrix is for the rotary part and the latent of all keys and values.
    yield Matrix(
        name=f"{name}kv_a_proj_with_mqa", inputs=hidden_size, outputs=latent_width + rotary_size
    )
    yield Matrix(
        name=f"{name}kv_b_proj",
        inputs=latent_width,
        outputs=attention_heads * (plain_size + value_size),
    )
    yield Matrix(name=f"{name}o_proj", inputs=attention_heads * value_size, outputs=hidden_size)
    if config.get("mla_use_output_gate"):  # Kimi Linear
        yield Matrix(name=f"{name}g_proj", inputs=hidden_size, outputs=attention_heads * value_size)


def _list_compressed_attention(
    config: Config, name: str, hidden_size: int, layer: int
) -> Iterator[Matrix]:
    """Yield the projections of DeepSeek V4's attention (vLLM 0.33, models/deepseek_v4).

    Layers that compress tokens have a compressor. Layers with the fine ratio also have an index,
    with another compressor.
    """
    heads = require_integer(config, *ATTENTION_HEADS)
    head_size = require_integer(config, "head_dim")
    query_rank = require_integer(config, "q_lora_rank")
    output_rank = require_integer(config, "o_lora_rank") * require_integer(config, "o_groups")
    group_inputs = heads * head_size // require_integer(config, "o_groups")
    yield Matrix(name=f"{name}wqa_wkv", inputs=hidden_size, outputs=query_rank + head_size)
    yield Matrix(name=f"{name}wq_b", inputs=query_rank, outputs=heads * head_size)
    yield Matrix(name=f"{name}wo_a", inputs=group_inputs, outputs=output_rank)
    yield Matrix(name=f"{name}o_proj", inputs=output_rank, outputs=hidden_size)
    ratio = config["compress_ratios"][layer]
    if ratio <= 1:
        return
    # A compressor has keys and gates for one latent. With the fine ratio, it has them for two
    # neighbouring latents.
    overlaps = 2 if ratio == FINE_RATIO else 1
    yield Matrix(
        name=f"{name}compressor",
        inputs=hidden_size,
        outputs=2 * overlaps * head_size,
        is_exempt=True,
    )
    if ratio != FINE_RATIO:
        return
    index_heads = require_integer(config, "index_n_heads")
    index_size = require_integer(config, "index_head_dim")
    yield Matrix(name=f"{name}indexer.wq_b", inputs=query_rank, outputs=index_heads * index_size)
    yield Matrix(
        name=f"{name}indexer.weights_proj",
        inputs=hidden_size,
        outputs=index_heads + 2 * overlaps * index_size,
        is_exempt=True,
    )


def _list_index(
    config: Config, name: str, hidden_size: int, index: SparseIndex
) -> Iterator[Matrix]:
    """Yield the projections of a sparse attention index (vLLM 0.33, models/deepseek_v32)."""
    query_inputs = read_integer(config, "q_lora_rank") or hidden_size
    yield Matrix(
        name=f"{name}indexer.wq_b", inputs=query_inputs, outputs=index.heads * index.head_size
    )
    yield Matrix(name=f"{name}indexer.wk", inputs=hidden_size, outputs=index.head_size)
    if query_inputs != hidden_size:
        yield Matrix(
            name=f"{name}indexer.weights_proj",
            inputs=hidden_size,
            outputs=index.heads,
            is_exempt=True,
        )


def _list_state(config: Config, name: str, hidden_size: int, state: StateSizes) -> Iterator[Matrix]:
    """Yield the matrices of a layer that keeps a state."""
    # Mamba-1, which has no heads, has additional matrices.
    if state.head_values == 0:
        yield from _list_mamba_1(config, name, state)
    if "linear_attn_config" in config:
        head_size = require_integer(read_mapping(config, "linear_attn_config"), "head_dim")
        yield Matrix(name=f"{name}f_b_proj", inputs=head_size, outputs=state.output_values)
    yield Matrix(
        name=f"{name}in_proj",
        inputs=hidden_size,
        outputs=state.convolution_inputs + state.output_values + state.head_values,
    )
    yield Matrix(name=f"{name}out_proj", inputs=state.output_values, outputs=hidden_size)


def _list_mamba_1(config: Config, name: str, state: StateSizes) -> Iterator[Matrix]:
    """Yield the matrices of Mamba-1 except its input and output (transformers, jamba)."""
    rank = require_integer(config, "mamba_dt_rank")
    state_size = state.state_values // state.output_values
    yield Matrix(name=f"{name}x_proj", inputs=state.output_values, outputs=rank + 2 * state_size)
    yield Matrix(name=f"{name}dt_proj", inputs=rank, outputs=state.output_values)
    yield Matrix(
        name=f"{name}state", inputs=state.output_values, outputs=state_size, is_exempt=True
    )


# A layer's MLP, which is dense or a mixture of experts.


def _has_mlp(config: Config, kind: str) -> bool:
    """Return whether a layer of this kind has an MLP.

    A layer may have an MLP alone or after its attention or state.
    """
    if kind in CACHELESS_KINDS:
        return True
    if config.get("model_type") == "nemotron_h":
        # The configuration lists this model's MLPs as layers.
        return False
    # In Falcon-H1, attention and state are listed as two layers, which share one MLP.
    return not (kind in STATEFUL_KINDS and config.get("model_type") == "falcon_h1")


def _list_dense_mlp(config: Config, name: str, hidden_size: int, layer: int) -> Iterator[Matrix]:
    """Yield the MLP matrices of a layer without experts.

    Raises ValueError for a Nemotron-NAS layer with an unsupported MLP.
    """
    # Llama 4 and MiniMax M3 give a separate width for layers without experts.
    width = read_integer(config, "intermediate_size_mlp", "dense_intermediate_size")
    blocks = config.get("block_configs")
    if isinstance(blocks, list):
        width = _read_nas_width(blocks[layer], hidden_size)
    elif width is None:
        width = read_mlp_width(config) or 0
    return _list_mlp(config, name, hidden_size, width)


NAS_WIDTH_STEP: Final = 256
"""Nemotron-NAS rounds its MLP widths up to multiples of this (vLLM 0.33, models/nemotron_nas.py,
`_find_multiple`).
"""


def _read_nas_width(block: Config, hidden_size: int) -> int:
    """Return the MLP width of a Nemotron-NAS layer, or 0 if it has no MLP.

    Raises ValueError for a layer that cannot be counted.
    """
    mlp = read_mapping(block, "ffn")
    factor = mlp.get("ffn_mult")
    if mlp.get("no_op"):
        return 0
    if mlp.get("replace_with_linear") or not isinstance(factor, int | float):
        raise ValueError("a layer has another MLP than usual")
    return ceil(int(2 * factor * hidden_size / 3) / NAS_WIDTH_STEP) * NAS_WIDTH_STEP


def _list_experts(config: Config, name: str, hidden_size: int) -> Iterator[Matrix]:
    """Yield the matrices of a mixture of experts: router, experts and shared experts.

    Every token passes through the shared experts.
    """
    count = read_integer(config, *EXPERT_COUNT) or 0
    experts_name = f"{name}experts."
    if config.get("enable_moe_block"):
        # Gemma 4 has a dense MLP next to the experts.
        yield from _list_mlp(config, name, hidden_size, read_mlp_width(config) or 0)
        experts_name = f"{name.removesuffix('mlp.')}experts."
    yield Matrix(name=f"{name}gate", inputs=hidden_size, outputs=count, is_exempt=True)
    expert_width = read_expert_width(config)
    expert_inputs = read_integer(config, *EXPERT_INPUTS)
    if expert_inputs is None:
        expert_inputs = hidden_size
    else:
        # The experts work on a narrower vector. One projection leads to this vector, and another
        # projection leads back.
        yield Matrix(name=f"{name}fc1_latent_proj", inputs=hidden_size, outputs=expert_inputs)
        yield Matrix(name=f"{name}fc2_latent_proj", inputs=expert_inputs, outputs=hidden_size)
    yield from _list_mlp(config, experts_name, expert_inputs, expert_width, copies=count)
    shared_width = read_shared_expert_width(config)
    if shared_width:
        yield from _list_mlp(config, f"{name}shared_experts.", hidden_size, shared_width)


def _list_mlp(
    config: Config, name: str, hidden_size: int, width: int, copies: int = 1
) -> Iterator[Matrix]:
    """Yield the matrices of an MLP: two, or three if it has a gate."""
    if str(config.get("model_type")) not in NOT_GATED:
        yield Matrix(name=f"{name}gate_proj", inputs=hidden_size, outputs=width, copies=copies)
    yield Matrix(name=f"{name}up_proj", inputs=hidden_size, outputs=width, copies=copies)
    yield Matrix(name=f"{name}down_proj", inputs=width, outputs=hidden_size, copies=copies)


def read_mlp_width(config: Config) -> int | None:
    """Return the width of a dense MLP.

    Returns None if there is neither a value nor a default. Raises ValueError for a value that is
    not a size.
    """
    model_type = config.get("model_type")
    width = read_integer(config, *MLP_WIDTH)
    # Granite models without experts list their MLP under the shared expert's name.
    if model_type == "granitemoehybrid" and not read_integer(config, *EXPERT_COUNT):
        width = read_integer(config, "shared_intermediate_size")
    if width is None and str(model_type) in NOT_GATED:
        hidden_size = read_integer(config, *HIDDEN_SIZE)
        if hidden_size is not None:
            return UNGIVEN_WIDTH_RATIO * hidden_size
    return width


def read_expert_width(config: Config) -> int:
    """Return an expert's width: `moe_intermediate_size`, or else the MLP's, or else 0.

    Raises ValueError for a value that is not a size.
    """
    return read_integer(config, "moe_intermediate_size") or read_mlp_width(config) or 0


def read_shared_expert_width(config: Config) -> int:
    """Return the total width of all shared experts, or 0 if there are none.

    Raises ValueError for a value that is not a size.
    """
    if config.get("model_type") == "llama4_text":
        # Llama 4 always has one shared expert, even though its configuration does not mention it.
        return read_mlp_width(config) or 0
    count = (
        read_integer(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        or 0
    )
    width = read_integer(config, "moe_shared_expert_intermediate_size")
    if width is None:
        width = read_expert_width(config)
    # Other configurations give the total width of all shared experts.
    total_width = (
        read_integer(config, "shared_expert_intermediate_size", "shared_intermediate_size") or 0
    )
    return count * width + total_width


class WidestMlp(Struct, frozen=True, kw_only=True):
    """The widest MLP that a token passes through."""

    # The values per token in the MLP. The values include those of all experts that a token passes
    # through.
    width: int
    # 1 for a dense MLP.
    experts_per_token: int


def read_widest_mlp(config: Config) -> WidestMlp | None:
    """Return the widest MLP that a token passes through.

    Returns None if no size is given. A token passes through the shared and the chosen experts.
    Therefore, their widths add up. Raises ValueError for a value that is not a size.
    """
    width = read_mlp_width(config)
    if not read_integer(config, *EXPERT_COUNT):
        return None if width is None else WidestMlp(width=width, experts_per_token=1)
    chosen = read_integer(config, *EXPERTS_PER_TOKEN) or 1
    expert_width = chosen * read_expert_width(config) + read_shared_expert_width(config)
    return WidestMlp(width=max(width or 0, expert_width), experts_per_token=chosen)


# Which layers have experts. Configurations give this information in different ways, and there is
# one function for each way. A function returns None if the configuration uses another way.


def _read_dense_layers(config: Config, index: int, _kind: str) -> bool | None:
    """Return False for a layer listed as a layer without experts (Qwen), otherwise None."""
    dense_layers = config.get("mlp_only_layers")
    if isinstance(dense_layers, list) and index in dense_layers:
        return False
    return None


def _read_layer_kind(config: Config, _index: int, kind: str) -> bool | None:
    """Return whether this is one of Nemotron-H's separate layers of experts.

    Returns None for other models.
    """
    if config.get("model_type") == "nemotron_h":
        return kind == "moe"
    return None


def _read_listed_mlp(config: Config, index: int, _kind: str) -> bool | None:
    """Return whether a layer has experts according to the list of MLPs (Laguna, MiMo-V2).

    The entries of the list are either names or the numbers 0 and 1. Returns None if there is no
    list.
    """
    mlp_kinds = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    if isinstance(mlp_kinds, list) and index < len(mlp_kinds):
        return mlp_kinds[index] in ("sparse", 1)
    return None


def _read_expert_period(config: Config, index: int, _kind: str) -> bool | None:
    """Return whether this is the one layer in each period that has experts (Jamba).

    Returns None if no period is given.
    """
    period = read_integer(config, "expert_layer_period")
    if period is None:
        return None
    offset = read_integer(config, "expert_layer_offset") or 0
    return index % period == offset


def _read_sparse_step(config: Config, index: int, _kind: str) -> bool | None:
    """Return whether a layer has experts: every `step`-th layer after the dense layers does.

    Never returns None: if these fields are missing, every layer has experts.
    """
    dense_count = read_integer(config, "first_k_dense_replace", "moe_layer_start_index") or 0
    step = read_integer(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return index >= dense_count and (index + 1) % step == 0


EXPERT_LAYER_READERS: Final[tuple[Callable[[Config, int, str], bool | None], ...]] = (
    _read_dense_layers,
    _read_layer_kind,
    _read_listed_mlp,
    _read_expert_period,
    _read_sparse_step,
)
"""The functions that tell whether a layer has experts. The first result that is not None is used.
Each function takes the configuration, and the index and kind of a layer.
"""


def _has_experts(config: Config, index: int, kind: str) -> bool:
    """Return whether the MLP of this layer is a mixture of experts."""
    if not read_integer(config, *EXPERT_COUNT):
        return False
    for read_expert_layer in EXPERT_LAYER_READERS:
        has_experts = read_expert_layer(config, index, kind)
        if has_experts is not None:
            return has_experts
    return False


class Adapter(Struct, frozen=True, kw_only=True):
    """The number of values in a LoRA adapter of rank 1."""

    # Values that every GPU of a tensor-parallel group holds in full.
    replicated_values: int
    # Values that tensor parallelism divides.
    divided_values: int


class LayerParameters(Struct, frozen=True, kw_only=True):
    """The total number of parameters in all layers, excluding embeddings, biases and norms."""

    total: int
    # The number of these parameters that the checkpoint stores without quantisation.
    unquantised: int
    # The number of these parameters that are in experts. Only some tokens pass through each expert.
    experts: int
    # The average bytes per quantised parameter. None if all parameters are quantised in the same
    # way.
    mixed_bytes: float | None = None
    # The adapter for all matrices except those of the experts.
    adapter: Adapter
    # The adapter for these experts.
    expert_adapter: Adapter

    def scale(self, factor: float) -> Self:
        """Return the parameters for `factor` times as many layers, with adapters unchanged."""
        return replace(
            self,
            total=round(self.total * factor),
            unquantised=round(self.unquantised * factor),
            experts=round(self.experts * factor),
        )


def count_layer_parameters(
    config: Config, kinds: Sequence[str], full_heads: KvHeads, windowed_heads: KvHeads
) -> LayerParameters | None:
    """Return the parameters of layers of these kinds, or None if they cannot be counted.

    Raises ValueError for a value that is not a size.
    """
    matrices = list_matrices(config, kinds, full_heads, windowed_heads)
    if matrices is None:
        return None
    is_unquantised = match_unquantised(config)
    read_matrix_bytes = match_matrix_bytes(config)
    unquantised = []
    mixed_bytes = 0.0
    for matrix in matrices:
        matrix_bytes = None if read_matrix_bytes is None else read_matrix_bytes(matrix.name)
        if matrix.is_exempt or is_unquantised(matrix.name):
            unquantised.append(matrix)
        elif matrix_bytes is not None:
            mixed_bytes += matrix.parameters * matrix_bytes
        # A matrix that is in no quantisation group keeps the model's dtype.
        elif read_matrix_bytes is not None:
            unquantised.append(matrix)
    experts = [matrix for matrix in matrices if EXPERTS in matrix.name]
    # Adapters are never applied to exempt matrices, and are applied to experts only on demand.
    adapted = [matrix for matrix in matrices if not (matrix.is_exempt or EXPERTS in matrix.name)]
    total = _sum_parameters(matrices)
    unquantised_total = _sum_parameters(unquantised)
    return LayerParameters(
        total=total,
        unquantised=unquantised_total,
        mixed_bytes=mixed_bytes / (total - unquantised_total) if mixed_bytes else None,
        experts=_sum_parameters(experts),
        adapter=_count_adapter(adapted),
        expert_adapter=_count_adapter(experts),
    )


def _sum_parameters(matrices: Sequence[Matrix]) -> int:
    return sum(matrix.parameters for matrix in matrices)


def _count_adapter(matrices: Sequence[Matrix]) -> Adapter:
    """Return the number of values in an adapter of rank 1 for these matrices.

    For each matrix, the adapter has two vectors: inputs x 1 and 1 x outputs. Tensor parallelism
    divides one of the two.
    """
    replicated_values = 0
    divided_values = 0
    for matrix in matrices:
        # If a matrix is split by rows, each GPU needs the adapter's whole output vector.
        if matrix.name.endswith(ROW_PARALLEL):
            replicated_values += matrix.copies * matrix.outputs
            divided_values += matrix.copies * matrix.inputs
        else:
            replicated_values += matrix.copies * matrix.inputs
            divided_values += matrix.copies * matrix.outputs
    return Adapter(replicated_values=replicated_values, divided_values=divided_values)
