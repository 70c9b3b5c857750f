"""What each layer of a model keeps in the KV cache.

A layer keeps every token, a window, a state, or nothing.
"""

from typing import Final

from msgspec import Struct

from vllm_headroom.units import FLOAT16_BYTES, FLOAT32_BYTES
from vllm_headroom_tools.sizing.config_fields import (
    ATTENTION_HEADS,
    HIDDEN_SIZE,
    KV_HEADS,
    MAMBA_2_GROUPS,
    MAMBA_2_HEAD_SIZE,
    MAMBA_2_HEADS,
    MAMBA_STATE_SIZE,
    Config,
    read_integer,
    read_mapping,
    require_integer,
)

FULL_KINDS: Final = frozenset(
    {
        "full_attention",
        "attention",
        "full",
        "global_attention",
        "global",
        "deepseek_sparse_attention",
    }
)
"""The names of layers that keep keys and values of every token. They are in `layer_types` and
`layers_block_type`.
"""

WINDOWED_KINDS: Final = frozenset(
    {"sliding_attention", "chunked_attention", "local_attention", "sliding_window"}
)
"""The names of layers that only keep keys and values of the last tokens."""

STATEFUL_KINDS: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv"})
"""The names of layers that keep a fixed-size state per sequence."""

CACHELESS_KINDS: Final = frozenset({"mlp", "moe", "dense"})
"""The names of layers that store nothing per sequence. They only consist of an MLP."""

UNDERSTOOD_KINDS: Final = FULL_KINDS | WINDOWED_KINDS | STATEFUL_KINDS | CACHELESS_KINDS
"""All kinds of layers whose cache is supported. "hybrid" is not included, because such a layer is a
combination of two kinds.
"""

NEMOTRON_LETTERS: Final = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
"""The letters in Nemotron-H's `hybrid_override_pattern`, which has one letter per layer."""

LAYER_LIMIT: Final = 10_000
"""Our choice: the largest accepted number of layers; real models have far fewer. Each layer is
given a name, and a billion names would fill the memory.
"""


def list_layer_kinds(config: Config, layer_count: int) -> list[str]:
    """Return the kind of each layer, from the configuration's list, letters, pattern or window.

    A Falcon-H1 layer is listed as two layers. Raises ValueError in these cases:

    - A layer kind's cache is not supported.
    - A list has the wrong length.
    - There are more layers than any model has.
    """
    if layer_count > LAYER_LIMIT:
        raise ValueError(f"{layer_count} layers are more than any model has")
    if config.get("model_type") == "falcon_h1":
        # Each Falcon-H1 layer has attention and a state side by side.
        return ["attention", "mamba2"] * layer_count
    kinds = _read_listed_kinds(config) or _repeat_pattern(config, layer_count)
    for kind in sorted(set(kinds)):
        # Reject unknown kinds, because guessing their cache would make the plan wrong.
        if kind not in UNDERSTOOD_KINDS:
            raise ValueError(f"how much a layer of kind {kind!r} keeps is not known here")
    if len(kinds) != layer_count:
        raise ValueError(f"it has {layer_count} layers and describes {len(kinds)}")
    has_stateful_layer = any(kind in STATEFUL_KINDS for kind in kinds)
    has_state_field = any(name.startswith(("mamba_", "ssm_")) for name in config)
    if has_state_field and not has_stateful_layer:
        raise ValueError("which of its layers keep a state is not known here")
    return kinds


FLAGGED_KINDS: Final = (
    ("hybrid_layer_pattern", "sliding_attention", "full_attention"),  # MiMo-V2
    ("attn_type_list", "full_attention", "linear_attention"),  # MiniMax
)
"""Fields with a flag per layer. Each field is followed by two layer kinds. The first is for flag 1,
the second for the other flag.
"""


def _read_listed_kinds(config: Config) -> list[str]:
    """Return the kinds in the configuration's list of layers.

    Returns an empty list if the configuration has none.
    """
    # Each model family has its own field for the layers. Only one of the functions below can apply
    # to a model.
    for read_kinds in (_read_block_kinds, _read_kimi_kinds, _read_nemotron_kinds, _read_flags):
        kinds = read_kinds(config)
        if kinds is not None:
            return kinds
    listed_kinds = config.get("layer_types") or config.get("layers_block_type")
    return [str(kind) for kind in listed_kinds] if isinstance(listed_kinds, list) else []


def _read_block_kinds(config: Config) -> list[str] | None:
    """Return the kinds from Nemotron-NAS's blocks, or None if there are no blocks.

    Raises ValueError for a layer with an unsupported kind of attention.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list):
        return None
    return ["mlp" if _has_no_attention(block) else "full_attention" for block in blocks]


def _read_kimi_kinds(config: Config) -> list[str] | None:
    """Return the kinds from Kimi Linear's list of full-attention layers.

    Returns None if there is no such list.
    """
    full_layers = read_mapping(config, "linear_attn_config").get("full_attn_layers")
    if not isinstance(full_layers, list):
        return None
    # The list contains layer numbers, which start at 1.
    numbers = range(1, (read_integer(config, "num_hidden_layers") or 0) + 1)
    return ["full_attention" if number in full_layers else "linear_attention" for number in numbers]


def _read_nemotron_kinds(config: Config) -> list[str] | None:
    """Return the kinds from Nemotron-H's letters, or None if the configuration has no letters."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    return [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]


def _read_flags(config: Config) -> list[str] | None:
    """Return each layer's kind from per-layer flags (FLAGGED_KINDS), or None if there are none."""
    for field, flagged_kind, usual_kind in FLAGGED_KINDS:
        flags = config.get(field)
        if isinstance(flags, list):
            return [flagged_kind if flag == 1 else usual_kind for flag in flags]
    return None


def _has_no_attention(block: object) -> bool:
    """Return whether a Nemotron-NAS layer lacks attention.

    Raises ValueError if its attention is replaced or has a window.
    """
    attention = read_mapping(block, "attention") if isinstance(block, dict) else {}
    if attention.get("replace_with_linear") or attention.get("window_length"):
        raise ValueError("a layer has another attention than usual")
    return bool(attention.get("no_op"))


def _repeat_pattern(config: Config, layer_count: int) -> list[str]:
    """Return the layer kinds of a model with a repeating pattern or one kind.

    If there is a window, every `interval`-th layer keeps all tokens. All other layers use the
    window.
    """
    if read_window_tokens(config) is None:
        usual_kind = "full_attention"
        other_kind = "linear_attention"
        interval = read_integer(config, "full_attention_interval")
    else:
        usual_kind = "sliding_attention"
        other_kind = "sliding_attention"
        interval = read_integer(config, "sliding_window_pattern")
    # The last of each `interval` layers keeps all tokens.
    if interval is not None:
        numbers = range(1, layer_count + 1)
        return ["full_attention" if number % interval == 0 else other_kind for number in numbers]
    period = read_integer(config, "attn_layer_period")  # Jamba
    if period is not None:
        offset = read_integer(config, "attn_layer_offset") or 0
        indices = range(layer_count)
        return ["full_attention" if index % period == offset else "mamba" for index in indices]
    return [usual_kind] * layer_count


def read_window_tokens(config: Config) -> int | None:
    """Return the window in tokens.

    Returns None if there is no window or a switch turns it off. Raises ValueError for a value that
    is not a size.
    """
    if config.get("use_sliding_window") is False:
        return None
    return read_integer(config, "sliding_window", "attention_chunk_size")


class StateSizes(Struct, frozen=True, kw_only=True):
    """The sizes of a layer that keeps a state (a state-space layer)."""

    # The number of values per token that the state contributes to the layer's output.
    output_values: int
    # The number of values in the state itself.
    state_values: int
    # The number of values per token that are inputs to the convolution.
    convolution_inputs: int
    # The values per token for the state's heads. 0 for Mamba-1, which has no heads.
    head_values: int
    # The number of tokens that the convolution covers. None if the configuration lacks this number.
    kernel_tokens: int | None


def read_state_sizes(config: Config) -> StateSizes | None:
    """Return the sizes of layers that keep a state.

    Returns None for an unknown kind of state. Raises ValueError if a size is missing.
    """
    # Each kind is recognised by a field that only this kind has.
    if "linear_num_value_heads" in config:
        return _read_gated_delta_net(config)
    if "linear_attn_config" in config:
        return _read_kimi_delta(read_mapping(config, "linear_attn_config"))
    kernel_tokens = read_integer(config, "mamba_d_conv", "conv_kernel")
    mamba_2_heads = read_integer(config, *MAMBA_2_HEADS)
    if mamba_2_heads is not None:
        return _read_mamba_2(config, mamba_2_heads, kernel_tokens)
    if "mamba_expand" in config:
        return _read_mamba_1(config, kernel_tokens)
    return None


def _read_gated_delta_net(config: Config) -> StateSizes:
    """Return the sizes of Qwen3-Next's gated DeltaNet (transformers, qwen3_next)."""
    value_heads = require_integer(config, "linear_num_value_heads")
    key_size = require_integer(config, "linear_key_head_dim")
    output_values = value_heads * require_integer(config, "linear_value_head_dim")
    key_heads = require_integer(config, "linear_num_key_heads")
    return StateSizes(
        output_values=output_values,
        state_values=output_values * key_size,
        # Queries, keys and values.
        convolution_inputs=2 * key_heads * key_size + output_values,
        # Each head has two values, beta and decay.
        head_values=2 * value_heads,
        kernel_tokens=read_integer(config, "linear_conv_kernel_dim"),
    )


def _read_kimi_delta(config: Config) -> StateSizes:
    """Return the sizes of Kimi's delta attention (vLLM 0.33, mamba_utils.py, `kda_state_shape`)."""
    heads = require_integer(config, "num_heads")
    head_size = require_integer(config, "head_dim")
    output_values = heads * head_size
    return StateSizes(
        output_values=output_values,
        state_values=output_values * head_size,
        # Queries, keys and values.
        convolution_inputs=3 * output_values,
        # One beta per head, and the input of the decay.
        head_values=heads + head_size,
        kernel_tokens=read_integer(config, "short_conv_kernel_size"),
    )


def _read_mamba_2(config: Config, heads: int, kernel_tokens: int | None) -> StateSizes:
    """Return the sizes of Mamba-2 (transformers, nemotron_h), whose fields have two names each."""
    output_values = heads * require_integer(config, *MAMBA_2_HEAD_SIZE)
    state_size = require_integer(config, *MAMBA_STATE_SIZE)
    groups = read_integer(config, *MAMBA_2_GROUPS) or 1
    return StateSizes(
        output_values=output_values,
        state_values=output_values * state_size,
        # The convolution covers the inputs to the state, and each group's vectors B and C.
        convolution_inputs=output_values + 2 * groups * state_size,
        head_values=heads,
        kernel_tokens=kernel_tokens,
    )


def _read_mamba_1(config: Config, kernel_tokens: int | None) -> StateSizes:
    """Return the sizes of Mamba-1 (transformers, jamba)."""
    output_values = require_integer(config, "mamba_expand") * require_integer(config, "hidden_size")
    return StateSizes(
        output_values=output_values,
        state_values=output_values * require_integer(config, *MAMBA_STATE_SIZE),
        convolution_inputs=output_values,
        head_values=0,
        kernel_tokens=kernel_tokens,
    )


FLOAT32_STATES: Final = ("nemotron_h", "kimi_linear")
"""Model types whose state uses 32 bits unless the configuration gives its dtype."""


def count_state_bytes(config: Config) -> int | None:
    """Return the bytes that one state-space layer keeps per sequence.

    The bytes cover the state and the last inputs of the convolution. The source is vLLM 0.32,
    model_executor/layers/mamba/mamba_utils.py, `MambaStateShapeCalculator`. The model sets the
    state's dtype (models/config.py). The inputs of the convolution use 16 bits. Returns None for an
    unsupported kind of state. Raises ValueError if a size is missing or invalid.
    """
    sizes = read_state_sizes(config)
    if sizes is None:
        return None
    state_dtype = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    if state_dtype is None and config.get("model_type") in FLOAT32_STATES:
        state_dtype = "float32"
    value_bytes = FLOAT32_BYTES if state_dtype == "float32" else FLOAT16_BYTES
    # The latest token's inputs are already available. The convolution only keeps the other tokens'
    # inputs.
    kept_tokens = (sizes.kernel_tokens or 1) - 1
    return sizes.state_values * value_bytes + sizes.convolution_inputs * kept_tokens * FLOAT16_BYTES


class KvHeads(Struct, frozen=True, kw_only=True):
    """The number of KV heads in a layer, and their key and value sizes."""

    count: int
    key_size: int
    value_size: int


def read_kv_heads(config: Config) -> tuple[KvHeads, KvHeads | None]:
    """Return the KV heads of full-attention layers, and those of windowed layers if they differ.

    The second value is None if windowed layers have the same heads. If the number of KV heads is
    missing, it is the number of query heads. Raises ValueError if a size is missing.
    """
    head_size = _read_head_size(config)
    head_count = _count_kv_heads(config)
    # In Gemma 4, the full-attention layers have wider heads.
    wide_head_size = read_integer(config, "global_head_dim")
    override = find_full_layer_override(config)
    if override is not None:
        wide_size = read_integer(override, "head_dim") or head_size
        wide_count = read_integer(override, "num_key_value_heads") or head_count
        wide = KvHeads(count=wide_count, key_size=wide_size, value_size=wide_size)
        return wide, KvHeads(count=head_count, key_size=head_size, value_size=head_size)
    if wide_head_size is not None:
        return _read_gemma_4_heads(config, head_count, head_size, wide_head_size)
    full = KvHeads(
        count=head_count,
        key_size=head_size,
        value_size=read_integer(config, "v_head_dim") or head_size,
    )
    return full, _read_mimo_windowed_heads(config, head_size)


OVERRIDES: Final = "per_layer_config"
"""transformers 5.24 stores the differences between layers in this field, by layer number
(integrations/heterogeneity/configuration_utils.py).
"""

HEAD_FIELDS: Final = frozenset({"head_dim", "num_key_value_heads"})


def find_full_layer_override(config: Config) -> Config | None:
    """Return the override of the full-attention layers' heads, if nothing else is overridden.

    Returns None if there are no overrides, or if they change anything else.
    """
    overrides = read_mapping(config, OVERRIDES)
    kinds = config.get("layer_types")
    if not overrides or not isinstance(kinds, list):
        return None
    full_layers = {str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"}
    first_override = next(iter(overrides.values()))
    if not isinstance(first_override, dict) or not first_override.keys() <= HEAD_FIELDS:
        return None
    is_same = all(override == first_override for override in overrides.values())
    return first_override if is_same and overrides.keys() == full_layers else None


def _read_head_size(config: Config) -> int:
    """Return the head size, or else hidden size / heads.

    Raises ValueError if both are missing.
    """
    attention_heads = read_integer(config, *ATTENTION_HEADS)
    hidden_size = read_integer(config, *HIDDEN_SIZE)
    head_size = read_integer(config, "head_dim", "kv_channels", "attention_head_dim")
    if head_size is None and hidden_size and attention_heads:
        head_size = hidden_size // attention_heads
    if not head_size:
        raise ValueError("head_dim is missing")
    return head_size


def _count_kv_heads(config: Config) -> int:
    """Return the number of KV heads or else of query heads.

    Raises ValueError if both are missing.
    """
    count = read_integer(config, *KV_HEADS) or _count_nas_heads(config)
    if count is None:
        count = read_integer(read_mapping(config, "attn_config"), *KV_HEADS)
    if count is None:
        count = read_integer(config, *ATTENTION_HEADS)
    # Falcon's newer decoders ignore this switch (transformers, falcon).
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        count = read_integer(config, "multi_query_group_num") or 1
    if count is None:
        raise ValueError(f"{KV_HEADS[0]} is missing")
    return count


def _count_nas_heads(config: Config) -> int | None:
    """Return the KV heads of Nemotron-NAS, or None for other models.

    Raises ValueError if the number differs from layer to layer.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list):
        return None
    query_heads = require_integer(config, *ATTENTION_HEADS)
    group_sizes = set()
    for block in blocks:
        if not _has_no_attention(block):
            group_sizes.add(require_integer(block["attention"], "n_heads_in_group"))
    # The model's shape only supports a single number of heads.
    if len(group_sizes) != 1:
        raise ValueError("its layers have different numbers of KV heads")
    return query_heads // group_sizes.pop()


def _read_gemma_4_heads(
    config: Config, head_count: int, head_size: int, wide_head_size: int
) -> tuple[KvHeads, KvHeads]:
    """Return Gemma 4's KV heads, first for layers without a window, then for windowed layers.

    The layers without a window have fewer but wider heads.
    """
    # Only with this switch, layers without a window have a different number of heads.
    full_count = None
    if config.get("attention_k_eq_v"):
        full_count = read_integer(config, "num_global_key_value_heads")
    full = KvHeads(
        count=full_count or head_count, key_size=wide_head_size, value_size=wide_head_size
    )
    return full, KvHeads(count=head_count, key_size=head_size, value_size=head_size)


def _read_mimo_windowed_heads(config: Config, head_size: int) -> KvHeads | None:
    """Return the KV heads of MiMo-V2's windowed layers, or None for other models."""
    count = read_integer(config, "swa_num_key_value_heads")
    if count is None:
        return None
    key_size = read_integer(config, "swa_head_dim") or head_size
    value_size = read_integer(config, "swa_v_head_dim") or key_size
    return KvHeads(count=count, key_size=key_size, value_size=value_size)
