"""The attention heads of a model's layers, of those with a window where they differ."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from vllm_headroom.sizing.fields import Config, part, whole

HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
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


def full_heads(config: Config) -> KvHeads:
    """Return the heads of layers that keep every token; raises ValueError where they are not told."""
    if whole(config, "global_head_dim"):  # Gemma 4
        size = whole(config, "global_head_dim") or 0
        own = whole(config, "num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return KvHeads(count=own or _count(config), key_size=size, value_size=size)
    size = _size(config)
    return KvHeads(count=_count(config), key_size=size, value_size=whole(config, "v_head_dim") or size)


def windowed_heads(config: Config) -> KvHeads | None:
    """Return the heads of layers with a window; None where they are as the others'."""
    if whole(config, "global_head_dim"):
        return KvHeads(count=_count(config), key_size=_size(config), value_size=_size(config))
    own = whole(config, "swa_num_key_value_heads")  # MiMo-V2
    if own is None:
        return None
    size = whole(config, "swa_head_dim") or _size(config)
    return KvHeads(count=own, key_size=size, value_size=whole(config, "swa_v_head_dim") or size)


def _count(config: Config) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return whole(config, "multi_query_group_num") or 1
    found = whole(config, *KV_HEADS) or whole(part(config, "attn_config"), *KV_HEADS) or whole(config, *HEADS)
    if found is None:
        raise ValueError(f"{KV_HEADS[0]} is missing")
    return found


def _size(config: Config) -> int:
    found, hidden, heads = (
        whole(config, "head_dim", "kv_channels", "attention_head_dim"),
        whole(config, *HIDDEN),
        whole(config, *HEADS),
    )
    if found is None and hidden is not None and heads is not None:
        found = hidden // heads
    if not found:
        raise ValueError("head_dim is missing")
    return found
