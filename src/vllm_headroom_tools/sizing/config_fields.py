"""Sizes from a model's configuration, where each size may have one of several names."""

from collections.abc import Mapping
from typing import Any, Final

Config = Mapping[str, Any]
"""A config.json or a part of one."""

SIZE_LIMIT: Final = 10**9
"""The largest accepted size. No model comes close to it, and arithmetic with it remains exact."""

ATTENTION_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
"""The number of query heads per attention layer."""

KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
    "kv_n_heads",
)
"""The number of key-value heads per attention layer."""

HIDDEN_SIZE: Final = ("hidden_size", "n_embd", "d_model")
"""The number of values per token between two layers."""

MLP_WIDTH: Final = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
"""The number of values per token inside a layer's MLP."""

EXPERT_COUNT: Final = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""The number of experts per layer; each token passes through a few of them."""

EXPERTS_PER_TOKEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_k",
)
"""The number of experts per layer that each token passes through."""

MODEL_LENGTH: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
)
"""The longest sequence, in tokens, that the model was designed for."""

KV_SHARING_LAYERS: Final = ("num_kv_shared_layers",)
"""The number of final layers that read the KV cache of earlier layers (Gemma 3n)."""

EXPERT_INPUTS: Final = ("moe_latent_size", "routed_expert_hidden_size")
"""The number of values per token inside the experts. It is only set if it differs from the hidden
size.
"""

MAMBA_2_HEADS: Final = ("mamba_n_heads", "mamba_num_heads")
MAMBA_2_HEAD_SIZE: Final = ("mamba_d_head", "mamba_head_dim")
MAMBA_2_GROUPS: Final = ("mamba_n_groups", "n_groups")
MAMBA_STATE_SIZE: Final = ("mamba_d_state", "ssm_state_size")


def read_integer(config: Config, *names: str) -> int | None:
    """Return the first field that is set.

    If the field is a list, returns its largest number. A field is not set if it is null, false, 0
    or []. If a field is not set, the next field is tried. Returns None if no field is set, or if a
    list contains only zeros. Raises ValueError for a value that is not a size.
    """
    for name in names:
        value = config.get(name)
        if _is_unset(value):
            continue
        # Like vLLM, use the largest number in a list. Buffers are sized for the widest layer.
        numbers = value if isinstance(value, list) else [value]
        if not all(_is_size(number) for number in numbers):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a whole number of a model's size")
        return int(max(numbers)) or None
    return None


def _is_unset(value: object) -> bool:
    """Return whether a field is null, false, 0 or [], and thus not set."""
    return value is None or value is False or value in (0, [])


def _is_size(number: object) -> bool:
    """Return whether a value is an integer from 0 to the largest accepted size."""
    # In Python, True is an integer, but in a configuration, it is a switch.
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    return 0 <= number <= SIZE_LIMIT


def require_integer(config: Config, *names: str) -> int:
    """Return the same as `read_integer`, but raise ValueError instead of returning None."""
    value = read_integer(config, *names)
    if value is None:
        raise ValueError(f"{names[0]} is missing")
    return value


def read_mapping(config: Config, *names: str) -> Config:
    """Return the first of these fields that is a mapping.

    Returns an empty mapping if there is none.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, dict):
            return value
    return {}
