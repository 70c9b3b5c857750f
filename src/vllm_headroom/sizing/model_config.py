"""A model's config.json: text to shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from vllm_headroom.sizing.fields import LARGEST, Config, needed, part, whole
from vllm_headroom.sizing.layers import FULL, STATEFUL, WINDOWED, kinds, state_bytes, window
from vllm_headroom.sizing.parameters import layer_parameters, mlp
from vllm_headroom.sizing.quantisation import kv_dtype_bytes, stored_bytes, weight_bytes_per_parameter
from vllm_headroom.sizing.shape import ModelShape

TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a multimodal model keeps its language model; `thinker_config` nests once more."""

OTHER_PARTS: Final = ("vision_config", "audio_config", "visual")

HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
VOCABULARY: Final = ("vocab_size", "padded_vocab_size")
KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
    "kv_n_heads",
)
LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

NOT_UNDERSTOOD: Final = ("index_head_dim", "compress_ratios", "block_configs", "per_layer_config", "global_head_dim")
"""Fields of models whose layers cache different or further things: sparse attention's index, layers that differ."""

SERVED_BYTES: Final = 2.0
"""Of a parameter that is not quantised: vLLM serves 32-bit models in 16 (config/model.py, `_resolve_auto_dtype`)."""

NOT_SCALED: Final = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"})
"""Kinds of rotary embedding whose `factor` is in the length already (vLLM 0.32, `_get_and_verify_max_len`)."""

LEFT_OUT: Final[Mapping[str, Config]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"sliding_window_pattern": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What published configurations leave out, since it is the default of their class in transformers."""

TIED: Final = frozenset(
    {"gpt2", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "gemma", "gemma2", "cohere", "cohere2"}
)
"""Model types whose output is the embedding where the configuration does not say, beside the newer Gemmas."""


def parse_model_config(text: str, overrides: Config | None = None) -> ModelShape | str:
    """Return the shape that a config.json describes, or what is wrong with it, in a sentence.

    Reads the field names of Hugging Face transformers, of the language part where there are several; `overrides` are
    fields that count in place of the file's. Multi-query and grouped-query attention are their number of key-value
    heads; without one every head has its own.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(root, dict):
        return "it is not a model's configuration, which is a JSON object"
    language = _language_part(root)
    left_out = LEFT_OUT.get(str(language.get("model_type")), {})
    config = {**root, **left_out, **_set(language), **(overrides or {})}
    unknown = next((name for name in NOT_UNDERSTOOD if config.get(name)), None)
    if unknown is not None:
        return f"what its attention keeps in the cache is not known here: it has {unknown}"
    try:
        return _shape(config)
    except ValueError as error:
        return f"it is not a model's configuration that is understood here: {error}"


def _language_part(config: Config) -> Config:
    found = part(config, *TEXT_PARTS)
    return _language_part(found) if found else config


def _set(config: Config) -> Config:
    return {name: value for name, value in config.items() if value is not None}


def _shape(config: Config) -> ModelShape:
    layers, heads, hidden = needed(config, *LAYERS), whole(config, *HEADS), whole(config, *HIDDEN)
    layer_kinds = kinds(config, layers)
    full, windowed, stateful = (sum(kind in names for kind in layer_kinds) for names in (FULL, WINDOWED, STATEFUL))
    if not full + windowed:
        raise ValueError("none of its layers has a KV cache")
    kv_heads, size = _kv_heads(config, heads), _head_size(config, hidden, heads)
    weight_bytes, quantisation = weight_bytes_per_parameter(config, SERVED_BYTES)
    found_mlp, latent = mlp(config), whole(config, "kv_lora_rank")
    return ModelShape(
        layers=layers,
        full_layers=full,
        windowed_layers=windowed,
        window_tokens=window(config) if windowed else None,
        stateful_layers=stateful,
        state_bytes=state_bytes(config) if stateful else None,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        value_head_size=whole(config, "v_head_dim") or size,
        latent_width=latent + (whole(config, "qk_rope_head_dim") or 0) if latent else None,
        hidden_size=hidden,
        vocabulary=whole(config, *VOCABULARY),
        mlp_width=found_mlp[0] if found_mlp else None,
        experts_per_token=found_mlp[1] if found_mlp else 1,
        tied_embeddings=_tied(config),
        layer_parameters=layer_parameters(
            config, attention_layers=layers - stateful, linear_layers=stateful, kv_heads=kv_heads
        ),
        other_parts=any(part(config, name) for name in OTHER_PARTS),
        max_model_len=_length(config),
        stored_bytes=stored_bytes(config),
        kv_dtype_bytes=kv_dtype_bytes(config, SERVED_BYTES),
        weight_bytes_per_parameter=weight_bytes,
        quantisation=quantisation,
    )


def _kv_heads(config: Config, heads: int | None) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return whole(config, "multi_query_group_num") or 1
    found = whole(config, *KV_HEADS) or whole(part(config, "attn_config"), *KV_HEADS) or heads
    if found is None:
        raise ValueError(f"{KV_HEADS[0]} is missing")
    return found


def _head_size(config: Config, hidden: int | None, heads: int | None) -> int:
    found = whole(config, "head_dim", "kv_channels", "attention_head_dim")
    if found is None and hidden is not None and heads is not None:
        found = hidden // heads
    if not found:
        raise ValueError("head_dim is missing")
    return found


def _length(config: Config) -> int | None:
    """Return the longest sequence that vLLM takes when it is told none: some scalings of positions stretch it."""
    length, scaling = whole(config, *LENGTHS), part(config, "rope_scaling", "rope_parameters")
    factor = scaling.get("factor")
    kind = str(scaling.get("rope_type") or scaling.get("type"))
    stretched = kind not in NOT_SCALED and "gemma3" not in str(config.get("model_type"))
    if length is None or not stretched or not isinstance(factor, int | float) or not 1 <= factor <= LARGEST:
        return length
    return int(length * factor)


def _tied(config: Config) -> bool:
    kind = str(config.get("model_type"))
    return bool(config.get("tie_word_embeddings", kind in TIED or kind.startswith("gemma3")))
