"""What each layer of a model keeps of a sequence: every token, a window, a state, or nothing."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

Config = Mapping[str, Any]

LARGEST: Final = 10**9
"""No size of a model comes near it, and arithmetic stays exact."""


def read_whole(config: Config, *names: str) -> int | None:
    """Return the first whole number that is set, of a list the largest; None for none and 0; raises ValueError."""
    for name in names:
        value = config.get(name)
        if value is None or value is False or value in (0, []):
            continue
        parts = value if isinstance(value, list) else [value]
        if not all(
            isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= LARGEST
            for part in parts
        ):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a whole number of a model's size")
        return int(max(parts)) or None
    return None


def read_needed(config: Config, *names: str) -> int:
    """Return the field as `whole` does; raises ValueError when there is none."""
    value = read_whole(config, *names)
    if value is None:
        raise ValueError(f"{names[0]} is missing")
    return value


def read_part(config: Config, *names: str) -> Config:
    """Return the first field that is a mapping, an empty one for none."""
    return next((found for name in names if isinstance(found := config.get(name), dict)), {})


FULL: Final = frozenset({"full_attention", "attention", "full", "global_attention", "global"})
WINDOWED: Final = frozenset(
    {"sliding_attention", "chunked_attention", "local_attention", "sliding_window"}
)
STATEFUL: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv"})
NOTHING: Final = frozenset({"mlp", "moe", "dense"})
KINDS: Final = FULL | WINDOWED | STATEFUL | NOTHING
"""Names of kinds of layers in `layer_types` and `layers_block_type`; a "hybrid" layer, of two kinds, is not known."""

PATTERN: Final = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""

MAMBA_2_HEADS: Final = ("mamba_n_heads", "mamba_num_heads")
MAMBA_2_SIZES: Final = ("mamba_d_head", "mamba_head_dim")
MAMBA_2_GROUPS: Final = ("mamba_n_groups", "n_groups")
STATE_SIZES: Final = ("mamba_d_state", "ssm_state_size")
MOST_LAYERS: Final = 10_000
"""Each gets a name: no model comes near it, and the names of a billion would take all memory."""


def list_kinds(config: Config, layers: int) -> list[str]:
    """Return each layer's kind, from the list, the letters, the pattern or the window that the configuration has.

    Raises ValueError at a kind whose cache is not known here, and at more layers than any model has.
    """
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers are more than any model has")
    if config.get("model_type") == "falcon_h1":  # each passes both, side by side
        return ["attention", "mamba2"] * layers
    found = _read_listed(config) or _follow_pattern(config, layers)
    unknown = sorted({kind for kind in found if kind not in KINDS})
    if unknown:
        raise ValueError(f"how much a layer of kind {unknown[0]!r} keeps is not known here")
    if len(found) != layers:
        raise ValueError(f"it has {layers} layers and describes {len(found)}")
    if not any(kind in STATEFUL for kind in found) and any(
        name.startswith(("mamba_", "ssm_")) for name in config
    ):
        raise ValueError("which of its layers keep a state is not known here")
    return found


def read_window(config: Config) -> int | None:
    """Return the window in tokens, where it is in use: some configurations name one and switch it off."""
    if config.get("use_sliding_window") is False:
        return None
    return read_whole(config, "sliding_window", "attention_chunk_size")


def _read_listed(config: Config) -> list[str]:
    if isinstance(letters := config.get("hybrid_override_pattern"), str):
        return [PATTERN.get(letter, letter) for letter in letters]
    if isinstance(windows := config.get("hybrid_layer_pattern"), list):  # MiMo-V2
        return ["sliding_attention" if flag == 1 else "full_attention" for flag in windows]
    if isinstance(flags := config.get("attn_type_list"), list):  # MiniMax
        return ["full_attention" if flag == 1 else "linear_attention" for flag in flags]
    listed = config.get("layer_types") or config.get("layers_block_type")
    return [str(kind) for kind in listed] if isinstance(listed, list) else []


def _follow_pattern(config: Config, layers: int) -> list[str]:
    windowed = read_window(config) is not None
    every = (
        read_whole(config, "sliding_window_pattern")
        if windowed
        else read_whole(config, "full_attention_interval")
    )
    if every is not None:
        other = "sliding_attention" if windowed else "linear_attention"
        return [
            "full_attention" if number % every == 0 else other for number in range(1, layers + 1)
        ]
    period = read_whole(config, "attn_layer_period")
    if period is not None:
        offset = read_whole(config, "attn_layer_offset") or 0
        return [
            "full_attention" if number % period == offset else "mamba" for number in range(layers)
        ]
    return ["sliding_attention" if windowed else "full_attention"] * layers


class StateSizes(Struct, frozen=True, kw_only=True):
    """A layer that keeps a state: how many `values`, and the `inputs` of a convolution over `kernel` tokens.

    `width` values go to its output, and `gates` belong to its heads; without any it is Mamba-1.
    """

    width: int
    values: int
    inputs: int
    gates: int
    kernel: int | None


def read_state(config: Config) -> StateSizes | None:
    """Return the sizes of layers that keep a state; None for a kind that is not known here.

    The gated delta net of Qwen3-Next (transformers, qwen3_next), Mamba-2 by its two namings (nemotron_h), and Mamba-1
    (jamba). Raises ValueError where a size is missing.
    """
    if "linear_num_value_heads" in config:
        heads, size = (
            read_needed(config, "linear_num_value_heads"),
            read_needed(config, "linear_key_head_dim"),
        )
        width, keys = (
            heads * read_needed(config, "linear_value_head_dim"),
            read_needed(config, "linear_num_key_heads"),
        )
        inputs, kernel = 2 * keys * size + width, read_whole(config, "linear_conv_kernel_dim")
        return StateSizes(
            width=width, values=width * size, inputs=inputs, gates=2 * heads, kernel=kernel
        )
    kernel = read_whole(config, "mamba_d_conv", "conv_kernel")
    if mamba_2_heads := read_whole(config, *MAMBA_2_HEADS):
        width, size = (
            mamba_2_heads * read_needed(config, *MAMBA_2_SIZES),
            read_needed(config, *STATE_SIZES),
        )
        inputs = width + 2 * (read_whole(config, *MAMBA_2_GROUPS) or 1) * size
        return StateSizes(
            width=width, values=width * size, inputs=inputs, gates=mamba_2_heads, kernel=kernel
        )
    if "mamba_expand" in config:
        width = read_needed(config, "mamba_expand") * read_needed(config, "hidden_size")
        values = width * read_needed(config, *STATE_SIZES)
        return StateSizes(width=width, values=values, inputs=width, gates=0, kernel=kernel)
    return None


def count_state_bytes(config: Config) -> int | None:
    """Return the bytes of one sequence in one layer; None for a kind that is not known here.

    A state and the last inputs of a convolution (vLLM 0.32, model_executor/layers/mamba/mamba_utils.py,
    `MambaStateShapeCalculator`).
    """
    if (found := read_state(config)) is None:
        return None
    said = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    in_full = said == "float32" or (
        said is None and config.get("model_type") == "nemotron_h"
    )  # models/config.py
    return found.values * (4 if in_full else 2) + found.inputs * ((found.kernel or 1) - 1) * 2


HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
    "kv_n_heads",
)


class KvHeads(Struct, frozen=True, kw_only=True):
    """How many heads keep keys and values, and how many values each."""

    count: int
    key_size: int
    value_size: int


def read_heads(config: Config) -> tuple[KvHeads, KvHeads | None]:
    """Return the heads of layers that keep all tokens, and of windowed ones where they differ; raises ValueError."""
    heads, hidden = read_whole(config, *HEADS), read_whole(config, *HIDDEN)
    size = read_whole(config, "head_dim", "kv_channels", "attention_head_dim")
    size = size or (hidden // heads if hidden and heads else 0)
    if not size:
        raise ValueError("head_dim is missing")
    count = (
        read_whole(config, *KV_HEADS)
        or read_whole(read_part(config, "attn_config"), *KV_HEADS)
        or heads
    )
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        count = read_whole(config, "multi_query_group_num") or 1
    if count is None:
        raise ValueError(f"{KV_HEADS[0]} is missing")
    if wide := read_whole(config, "global_head_dim"):  # Gemma 4
        own = (
            read_whole(config, "num_global_key_value_heads")
            if config.get("attention_k_eq_v")
            else None
        )
        full = KvHeads(count=own or count, key_size=wide, value_size=wide)
        return full, KvHeads(count=count, key_size=size, value_size=size)
    full = KvHeads(count=count, key_size=size, value_size=read_whole(config, "v_head_dim") or size)
    own = read_whole(config, "swa_num_key_value_heads")  # MiMo-V2
    if own is None:
        return full, None
    size = read_whole(config, "swa_head_dim") or size
    return full, KvHeads(
        count=own, key_size=size, value_size=read_whole(config, "swa_v_head_dim") or size
    )
