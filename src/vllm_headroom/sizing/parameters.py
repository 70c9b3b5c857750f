"""How many parameters the layers of a decoder have, counted from its configuration."""

from __future__ import annotations

from typing import Final

from vllm_headroom.sizing.fields import Config, needed, whole

NOT_GATED: Final = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "falcon", "bloom", "mpt", "starcoder2"})
"""Model types whose MLP has two matrices instead of three; without a size of its own it is four times as wide."""

OWN_WAYS: Final = ("ffn_config", "hybrid_override_pattern", "mamba_expand", "mamba_n_heads", "conv_L_cache")
"""Fields of models whose layers are not alike enough to be counted here."""


def mlp(config: Config) -> tuple[int, int] | None:
    """Return the width of the widest MLP that a token passes, and its experts; None where the size is not told.

    An expert is as wide as `moe_intermediate_size`, else as the MLP; shared experts are passed beside the chosen.
    """
    inner = _inner(config)
    experts = whole(config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
    if inner is None or not _count(config):
        return None if inner is None else (inner, 1)
    chosen = experts or 1
    return max(inner, chosen * _expert_inner(config, inner) + _shared_inner(config, inner)), chosen


def layer_parameters(config: Config, *, attention_layers: int, linear_layers: int, kv_heads: int) -> int | None:
    """Return the parameters of all layers, without embeddings, biases and norms; None where they cannot be counted.

    Attention: query, key, value and output projections, or latent attention's low-rank ones, or a gated delta net's.
    MLP: three matrices where it is gated, else two; experts, shared experts and the router where there are experts.
    """
    hidden, inner = whole(config, "hidden_size", "n_embd", "d_model"), _inner(config)
    heads = whole(config, "num_attention_heads", "n_head", "n_heads")
    untold = linear_layers and "linear_num_value_heads" not in config
    if hidden is None or inner is None or heads is None or untold or any(name in config for name in OWN_WAYS):
        return None
    layers = attention_layers + linear_layers
    size = whole(config, "head_dim", "kv_channels") or hidden // heads
    plain = 2 * hidden * (heads + kv_heads) * size
    attention = _latent(config, heads, hidden) if whole(config, "kv_lora_rank") else plain
    mixing = attention_layers * attention + (linear_layers * _delta_net(config, hidden) if linear_layers else 0)
    matrices = 2 if str(config.get("model_type")) in NOT_GATED else 3
    return mixing + _mlps(config, layers, hidden, inner, matrices)


def _inner(config: Config) -> int | None:
    inner = whole(config, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    if inner is None and str(config.get("model_type")) in NOT_GATED:
        hidden = whole(config, "hidden_size", "n_embd", "d_model")
        return None if hidden is None else 4 * hidden
    return inner


def _mlps(config: Config, layers: int, hidden: int, inner: int, matrices: int) -> int:
    count = _count(config)
    if not count:
        return layers * matrices * hidden * inner
    first = whole(config, "first_k_dense_replace") or 0
    sparse = (layers - first) // (whole(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1)
    one = 3 * hidden * (count * _expert_inner(config, inner) + _shared_inner(config, inner)) + hidden * count
    dense = matrices * hidden * (whole(config, "intermediate_size_mlp") or inner)
    return (layers - sparse) * dense + sparse * one


def _count(config: Config) -> int | None:
    return whole(config, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


def _expert_inner(config: Config, inner: int) -> int:
    return whole(config, "moe_intermediate_size") or inner


def _shared_inner(config: Config, inner: int) -> int:
    if config.get("model_type") == "llama4_text":
        return inner  # always one, which its configuration does not say
    shared = whole(config, "n_shared_experts", "moe_num_shared_experts") or 0
    return shared * _expert_inner(config, inner) + (whole(config, "shared_expert_intermediate_size") or 0)


def _latent(config: Config, heads: int, hidden: int) -> int:
    """Return latent attention's projections (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    latent, rotary = needed(config, "kv_lora_rank"), whole(config, "qk_rope_head_dim") or 0
    plain, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
    query, asked = whole(config, "q_lora_rank"), heads * (plain + rotary)
    queries = hidden * query + query * asked if query else hidden * asked
    return queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden


def _delta_net(config: Config, hidden: int) -> int:
    """Return a gated delta net's projections: query, key, value, gate and output (transformers, qwen3_next)."""
    keys = needed(config, "linear_num_key_heads") * needed(config, "linear_key_head_dim")
    heads = needed(config, "linear_num_value_heads")
    values = heads * needed(config, "linear_value_head_dim")
    return hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
