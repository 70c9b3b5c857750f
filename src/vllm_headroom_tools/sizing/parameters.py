"""How many parameters the layers of a model have, and of which sort, counted from its configuration."""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from vllm_headroom_tools.sizing.layers import (
    HEADS,
    HIDDEN,
    MAMBA_2_HEADS,
    NOTHING,
    STATEFUL,
    WINDOWED,
    Config,
    KvHeads,
    StateSizes,
    read_needed,
    read_state,
    read_whole,
)
from vllm_headroom_tools.sizing.quantisation import match_plain

NOT_GATED: Final = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "falcon", "bloom", "mpt", "starcoder2"),
        *("bert", "roberta", "xlm-roberta", "nemotron", "nemotron_h", "arcee", "phi", "persimmon"),
    }
)
"""Model types whose MLP has two matrices instead of three; without a given size it is four times as wide."""

INNER: Final = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERTS: Final = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")

LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
)

SHARED: Final = ("num_kv_shared_layers",)
"""How many of the last layers read the cache of earlier ones, and keep nothing (Gemma 3n)."""

STATES: Final = frozenset({"linear_num_value_heads", "mamba_dt_rank", *MAMBA_2_HEADS})
"""Fields of the kinds of states whose projections are counted here."""

OWN_WAYS: Final = (
    "ffn_config",
    "conv_L_cache",
    "moe_latent_size",
    "use_double_wide_mlp",
    "zero_expert_num",
)
"""Fields of models whose layers are not alike enough to be counted here."""


class Matrix(Struct, frozen=True, kw_only=True):
    """`copies` of a matrix, such as one for each expert; `router` is one that no method quantises or adapts."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    router: bool = False

    @property
    def parameters(self) -> int:
        """How many parameters all copies have."""
        return self.inputs * self.outputs * self.copies


def list_matrices(
    config: Config, kinds: Sequence[str], heads_of_full: KvHeads, heads_of_windowed: KvHeads
) -> tuple[Matrix, ...] | None:
    """Return the matrices of layers of these kinds; None where they are not known."""
    hidden, heads = read_whole(config, *HIDDEN), read_whole(config, *HEADS)
    has_mlp = hidden and heads and (read_width(config) or read_whole(config, *EXPERTS))
    if hidden is None or heads is None or not has_mlp or any(config.get(name) for name in OWN_WAYS):
        return None
    state = read_state(config) if STATES & set(config) else None
    if state is None and any(kind in STATEFUL for kind in kinds):
        return None
    found: list[Matrix] = []
    if config.get("model_type") in (
        "gpt2",
        "gpt_bigcode",
        "opt",
        "bert",
        "roberta",
        "xlm-roberta",
    ):  # a weight a place
        found.append(
            Matrix(
                name="positions",
                inputs=read_whole(config, *LENGTHS) or 0,
                outputs=hidden,
                router=True,
            )
        )
    found += _list_per_layer(config, hidden, len(kinds))
    for number, kind in enumerate(kinds):
        place = f"layers.{number}."
        if kind in STATEFUL and state is not None:
            found += _list_stateful(config, f"{place}mixer.", hidden, state)
        elif kind not in NOTHING:
            kept = heads_of_windowed if kind in WINDOWED else heads_of_full
            own = (
                ("k_proj", "v_proj")
                if number >= len(kinds) - (read_whole(config, *SHARED) or 0)
                else ()
            )
            attention = _list_attention(config, f"{place}self_attn.", (hidden, heads), kept)
            found += [each for each in attention if not each.name.endswith(own)]
        is_second = kind in STATEFUL and config.get("model_type") == "falcon_h1"
        if kind in NOTHING or not (
            is_second or isinstance(config.get("hybrid_override_pattern"), str)
        ):
            found += _list_mlp(
                config, f"{place}mlp.", hidden, sparse=_is_sparse(config, number, kind)
            )
    return tuple(found)


def _list_per_layer(config: Config, hidden: int, count: int) -> Iterator[Matrix]:
    """Yield the embedding of a token for each layer, and the alternating updates (vLLM 0.32, models/gemma3n.py)."""
    if width := read_whole(config, "hidden_size_per_layer_input"):
        rows = read_whole(config, "vocab_size_per_layer_input", "vocab_size") or 0
        yield Matrix(name="per_layer_embeddings", inputs=rows, outputs=count * width, router=True)
        yield Matrix(
            name="per_layer_projections",
            inputs=hidden,
            outputs=width,
            copies=3 * count,
            router=True,
        )
    if streams := read_whole(config, "altup_num_inputs"):
        yield Matrix(
            name="altup_projections",
            inputs=hidden,
            outputs=hidden,
            copies=2 * (streams - 1),
            router=True,
        )
        yield Matrix(
            name="laurel",
            inputs=hidden,
            outputs=read_whole(config, "laurel_rank") or 0,
            copies=2 * count,
        )


def count_beside(config: Config, count: int) -> int:
    """Return the values of a token beside its hidden state: those for each layer, further streams before and after."""
    streams, hidden = read_whole(config, "altup_num_inputs") or 1, read_whole(config, *HIDDEN) or 0
    return (
        count * (read_whole(config, "hidden_size_per_layer_input") or 0)
        + 2 * (streams - 1) * hidden
    )


def read_width(config: Config) -> int | None:
    """Return the width of the MLP; None where it is not given."""
    found = read_whole(config, *INNER)
    if config.get("model_type") == "granitemoehybrid" and not read_whole(config, *EXPERTS):
        found = read_whole(config, "shared_intermediate_size")
    if found is None and str(config.get("model_type")) in NOT_GATED:
        hidden = read_whole(config, *HIDDEN)
        return None if hidden is None else 4 * hidden
    return found


def read_expert_width(config: Config) -> int:
    """Return the width of one expert."""
    return read_whole(config, "moe_intermediate_size") or read_width(config) or 0


def read_shared_width(config: Config) -> int:
    """Return the width of the experts that every token passes, together."""
    if config.get("model_type") == "llama4_text":
        return read_width(config) or 0  # always one, which its configuration does not say
    shared = (
        read_whole(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
    )
    width = read_whole(config, "moe_shared_expert_intermediate_size")
    return shared * (width or read_expert_width(config)) + (
        read_whole(config, "shared_expert_intermediate_size", "shared_intermediate_size") or 0
    )


def _is_sparse(config: Config, number: int, kind: str) -> bool:
    dense = config.get("mlp_only_layers")
    if not read_whole(config, *EXPERTS) or (isinstance(dense, list) and number in dense):
        return False
    if isinstance(config.get("hybrid_override_pattern"), str):
        return kind == "moe"
    flags = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    if isinstance(flags, list) and number < len(flags):
        return flags[number] in ("sparse", 1)
    if period := read_whole(config, "expert_layer_period"):  # Jamba
        return number % period == (read_whole(config, "expert_layer_offset") or 0)
    first = read_whole(config, "first_k_dense_replace", "moe_layer_start_index") or 0
    step = read_whole(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return number >= first and (number + 1) % step == 0


def _list_mlp(config: Config, place: str, hidden: int, *, sparse: bool) -> Iterator[Matrix]:
    if not sparse:
        width = read_whole(config, "intermediate_size_mlp") or read_width(config) or 0
        yield from _list_gated(config, place, hidden, width, 1)
        return
    count = read_whole(config, *EXPERTS) or 0
    if config.get("enable_moe_block"):  # Gemma 4 passes both
        yield from _list_gated(config, place, hidden, read_width(config) or 0, 1)
    yield Matrix(name=f"{place}gate", inputs=hidden, outputs=count, router=True)
    yield from _list_gated(config, f"{place}experts.", hidden, read_expert_width(config), count)
    if shared := read_shared_width(config):
        yield from _list_gated(config, f"{place}shared_experts.", hidden, shared, 1)


def _list_gated(
    config: Config, place: str, hidden: int, width: int, copies: int
) -> Iterator[Matrix]:
    names = ("up_proj",) if str(config.get("model_type")) in NOT_GATED else ("gate_proj", "up_proj")
    for name in names:
        yield Matrix(name=f"{place}{name}", inputs=hidden, outputs=width, copies=copies)
    yield Matrix(name=f"{place}down_proj", inputs=width, outputs=hidden, copies=copies)


def _list_attention(
    config: Config, place: str, sizes: tuple[int, int], kept: KvHeads
) -> Iterator[Matrix]:
    """Yield the projections of attention, or of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    hidden, heads = sizes
    if latent := read_whole(config, "kv_lora_rank"):
        rotary, query = (
            read_whole(config, "qk_rope_head_dim") or 0,
            read_whole(config, "q_lora_rank"),
        )
        plain, value = read_needed(config, "qk_nope_head_dim"), read_needed(config, "v_head_dim")
        if query:
            yield Matrix(name=f"{place}q_a_proj", inputs=hidden, outputs=query)
        asked = heads * (plain + rotary)
        yield Matrix(
            name=f"{place}q_b_proj" if query else f"{place}q_proj",
            inputs=query or hidden,
            outputs=asked,
        )
        yield Matrix(name=f"{place}kv_a_proj_with_mqa", inputs=hidden, outputs=latent + rotary)
        yield Matrix(name=f"{place}kv_b_proj", inputs=latent, outputs=heads * (plain + value))
        yield Matrix(name=f"{place}o_proj", inputs=heads * value, outputs=hidden)
        return
    queries = (
        2 if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next" else 1
    )  # and their gates
    yield Matrix(name=f"{place}q_proj", inputs=hidden, outputs=queries * heads * kept.key_size)
    yield Matrix(name=f"{place}k_proj", inputs=hidden, outputs=kept.count * kept.key_size)
    yield Matrix(name=f"{place}v_proj", inputs=hidden, outputs=kept.count * kept.value_size)
    yield Matrix(name=f"{place}o_proj", inputs=heads * kept.value_size, outputs=hidden)


def _list_stateful(config: Config, place: str, hidden: int, found: StateSizes) -> Iterator[Matrix]:
    if not found.gates:
        rank, size = read_needed(config, "mamba_dt_rank"), found.values // found.width
        yield Matrix(name=f"{place}x_proj", inputs=found.width, outputs=rank + 2 * size)
        yield Matrix(name=f"{place}dt_proj", inputs=rank, outputs=found.width)
        yield Matrix(name=f"{place}state", inputs=found.width, outputs=size, router=True)
    yield Matrix(
        name=f"{place}in_proj", inputs=hidden, outputs=found.inputs + found.width + found.gates
    )
    yield Matrix(name=f"{place}out_proj", inputs=found.width, outputs=hidden)


class Adapter(Struct, frozen=True, kw_only=True):
    """The values that an adapter of rank 1 adds: what tensor parallelism leaves whole, and what it divides."""

    whole: int
    divided: int


class LayerParameters(Struct, frozen=True, kw_only=True):
    """Parameters of all layers together, without embeddings, biases and norms.

    `plain` are those that the checkpoint's quantisation leaves out, `experts` those of experts that not every token
    passes. `expert_adapter` is of these, `adapter` of all others.
    """

    total: int
    plain: int
    experts: int
    adapter: Adapter
    expert_adapter: Adapter


def count_layer_parameters(
    config: Config, kinds: Sequence[str], full: KvHeads, windowed: KvHeads
) -> LayerParameters | None:
    """Return the parameters of layers of these kinds; None where they cannot be counted."""
    found = list_matrices(config, kinds, full, windowed)
    if found is None:
        return None
    plain = match_plain(config)
    experts = [each for each in found if ".experts." in each.name]
    return LayerParameters(
        total=sum(each.parameters for each in found),
        plain=sum(each.parameters for each in found if each.router or plain(each.name)),
        experts=sum(each.parameters for each in experts),
        adapter=_count_adapter(
            [each for each in found if not each.router and ".experts." not in each.name]
        ),
        expert_adapter=_count_adapter(experts),
    )


def _count_adapter(found: Sequence[Matrix]) -> Adapter:
    whole = divided = 0
    for each in found:
        is_row_parallel = each.name.endswith(
            ("o_proj", "down_proj", "out_proj")
        )  # its inputs are divided
        whole += each.copies * (each.outputs if is_row_parallel else each.inputs)
        divided += each.copies * (each.inputs if is_row_parallel else each.outputs)
    return Adapter(whole=whole, divided=divided)


def read_mlp(config: Config) -> tuple[int, int] | None:
    """Return the width of the widest MLP that a token passes, and its experts; None where the size is not given.

    An expert is as wide as `moe_intermediate_size`, else as the MLP; shared experts are passed beside the chosen.
    """
    width = read_width(config)
    names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "top_k_experts",
        "moe_k",
    )
    if not read_whole(config, *EXPERTS):
        return None if width is None else (width, 1)
    chosen = read_whole(config, *names) or 1
    return max(width or 0, chosen * read_expert_width(config) + read_shared_width(config)), chosen
