"""A model's configuration, as it lies in a folder beside its weights: to shape."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.text_file import read_file
from vllm_headroom_tools.sizing import layers
from vllm_headroom_tools.sizing.encoder import Encoder, parse_encoder
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.layers import Config, read_needed, read_part, read_whole
from vllm_headroom_tools.sizing.parameters import (
    LENGTHS,
    SHARED,
    count_beside,
    count_layer_parameters,
    read_mlp,
)
from vllm_headroom_tools.sizing.quantisation import (
    read_kv_dtype_bytes,
    read_stored_bytes,
    read_weight_bytes,
)

KNOWN: Final = frozenset(
    {
        *(
            "arcee",
            "bert",
            "cohere",
            "cohere2",
            "deepseek_v2",
            "deepseek_v3",
            "ernie4_5",
            "ernie4_5_moe",
            "exaone4",
        ),
        *(
            "exaone_moe",
            "falcon",
            "falcon_h1",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
        ),
        *(
            "glm",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "gpt2",
            "gpt_bigcode",
            "gpt_neox",
            "gpt_oss",
            "gptj",
        ),
        *(
            "granite",
            "granitemoe",
            "helium",
            "jamba",
            "kimi_k2",
            "laguna",
            "llama",
            "llama4_text",
            "mimo_v2_flash",
        ),
        *(
            "minimax_m2",
            "ministral3",
            "mistral",
            "mixtral",
            "modernbert",
            "nemotron_h",
            "olmo",
            "olmo2",
            "olmo3",
        ),
        *(
            "olmoe",
            "opt",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_5_moe_text",
        ),
        *(
            "qwen3_5_text",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
            "roberta",
            "seed_oss",
        ),
        *("smollm3", "stablelm", "starcoder2", "xlm-roberta"),
    }
)
"""The `model_type`s whose KV cache is counted as vLLM counts it: the tests have a recorded model of each."""

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

ENCODERS: Final = frozenset(
    {
        "bert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "modernbert",
        "nomic_bert",
        "gte",
        "new",
        "ernie",
        "distilbert",
    }
)
"""Model types that read a text at once: they keep no keys and values (vLLM, `EncoderOnlyAttentionSpec`)."""

HEADLESS: Final = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForEmbedding")
"""How classes end that embed, classify or reward: what would give the next token's logits is not loaded."""

HEADED: Final = frozenset({"GPT2LMHeadModel", "ChatGLMModel", "LlavaLlamaModel"})
"""Classes of generating models that end so too."""


TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a multimodal model keeps its language model; `thinker_config` nests once more."""

LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NOT_UNDERSTOOD: Final = ("index_head_dim", "compress_ratios", "block_configs", "per_layer_config")
"""Fields of models whose layers cache different or further things: sparse attention's index, layers that differ."""

SERVED_BYTES: Final = 2.0
"""Of a parameter that is not quantised: vLLM serves 32-bit models in 16 (config/model.py, `_resolve_auto_dtype`)."""

NOT_SCALED: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}
)
"""Kinds of rotary embedding whose `factor` is in the length already (vLLM 0.32, `_get_and_verify_max_len`)."""


def parse_model_config(
    text: str, overrides: Config | None = None, beside: Config | None = None
) -> ModelShape | str:
    """Return the shape that a config.json describes, or what is wrong with it, in a sentence.

    Reads the field names of Hugging Face transformers, of the language part where there are several; `overrides` are
    fields that count in place of the file's, and those `beside` it where it has none. Multi-query and grouped-query
    attention are their number of key-value heads; without one every head has its own.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(root, dict):
        return "it is not a model's configuration, which is a JSON object"
    language, config = _find_language_part(root), dict(beside or {})
    for part in (
        root,
        LEFT_OUT.get(str(language.get("model_type")), {}),
        language,
        overrides or {},
    ):
        config |= {name: value for name, value in part.items() if value is not None}
    unknown = next((name for name in NOT_UNDERSTOOD if config.get(name)), None)
    if unknown is not None:
        return f"what its attention keeps in the cache is not known here: it has {unknown}"
    try:
        return _build_shape(config, parse_encoder({**(beside or {}), **root}))
    except ValueError as error:
        return f"it is not a model's configuration that is understood here: {error}"


def _find_language_part(config: Config) -> Config:
    found = read_part(config, *TEXT_PARTS)
    return _find_language_part(found) if found else config


def _build_shape(config: Config, beside: Encoder | None) -> ModelShape:
    count, kind = (
        read_whole(config, "decoder_layers") or read_needed(config, *LAYERS),
        config.get("model_type"),
    )
    is_whole = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
    whole_text = is_whole or str(kind) in ENCODERS
    found_kinds = layers.list_kinds(config, count)
    kept = found_kinds[: len(found_kinds) - (read_whole(config, *SHARED) or 0)]
    full, windowed, stateful = (
        sum(kind in names for kind in kept)
        for names in (layers.FULL, layers.WINDOWED, layers.STATEFUL)
    )
    if not full + windowed:
        raise ValueError("none of its layers has a KV cache")
    heads, narrow = layers.read_heads(config)
    weight_bytes, quantisation = read_weight_bytes(config, SERVED_BYTES)
    found_mlp, latent = read_mlp(config), read_whole(config, "kv_lora_rank")
    has_checkpoint = stateful and read_whole(config, *layers.MAMBA_2_HEADS)  # at the prompt's end
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    is_headless = (
        whole_text or config.get(POOLED) or (name.endswith(HEADLESS) and name not in HEADED)
    )
    is_usually_tied = str(kind) in TIED or str(kind).startswith(("gemma3", "gemma4"))
    is_tied = bool(is_headless or config.get("tie_word_embeddings", is_usually_tied))
    length, scaling = (
        read_whole(config, *LENGTHS),
        read_part(config, "rope_scaling", "rope_parameters"),
    )
    factor, way = scaling.get("factor"), str(scaling.get("rope_type") or scaling.get("type"))
    if (
        length
        and way not in NOT_SCALED
        and "gemma3" not in str(kind)
        and isinstance(factor, int | float)
    ):
        length = (
            int(length * factor) if 1 <= factor <= layers.LARGEST else length
        )  # vLLM takes longer ones by default
    return ModelShape(
        layers=count,
        full_layers=0 if whole_text else full,
        windowed_layers=0 if whole_text else windowed,
        window_tokens=layers.read_window(config) if windowed and not whole_text else None,
        chunked=bool(windowed)
        and ("chunked_attention" in found_kinds or read_whole(config, "sliding_window") is None),
        windowed_heads=narrow,
        stateful_layers=stateful,
        state_bytes=layers.count_state_bytes(config) if stateful else None,
        state_checkpoints=1 if has_checkpoint else 0,
        attention_heads=read_whole(config, *layers.HEADS),
        heads=heads,
        latent_width=latent + (read_whole(config, "qk_rope_head_dim") or 0) if latent else None,
        hidden_size=read_whole(config, *layers.HIDDEN),
        vocabulary=read_whole(config, "vocab_size", "padded_vocab_size"),
        beside_width=count_beside(config, count),
        mlp_width=found_mlp[0] if found_mlp else None,
        experts_per_token=found_mlp[1] if found_mlp else 1,
        tied_embeddings=is_tied,
        parameters=count_layer_parameters(config, found_kinds, heads, narrow or heads),
        encoder=beside,
        max_model_len=length,
        stored_bytes=read_stored_bytes(config),
        kv_dtype_bytes=read_kv_dtype_bytes(config, SERVED_BYTES),
        weight_bytes_per_parameter=weight_bytes,
        quantisation=quantisation,
        unknown_type=None if kind is None or str(kind) in KNOWN else str(kind)[:40],
    )


NAME: Final = "config.json"
POOLED: Final = "modules.json"
"""Beside it, a model embeds (sentence-transformers): vLLM serves it without the next token's logits."""

LARGEST_BYTES: Final = 2**24
"""A real one is a few kB."""

LARGEST_INDEX_BYTES: Final = 2**27
"""Of a checkpoint's index: a line of 100 bytes per weight: 10 MB for 384 experts in each of 60 layers."""

MOST_BYTES: Final = 2**53


def read_model(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape | str:
    """Return the shape of the model of this config.json or folder, or what is wrong; `overrides` replace fields."""
    try:
        file = path / NAME if path.is_dir() else path
        text = read_file(file, LARGEST_BYTES).decode("utf-8-sig")
    except OSError as error:
        what = f"its {NAME}" if path.is_dir() else "it"
        return f"{what} cannot be read: {error.strerror}; it takes a config.json or its folder, and downloads none"
    except UnicodeDecodeError:
        return "it is not JSON: it is no text in UTF-8"
    beside: dict[str, Any] = {"preprocessor": _read_json(file.parent / "preprocessor_config.json")}
    beside[POOLED] = (file.parent / POOLED).is_file()
    said = _read_json(file.parent / "hf_quant_config.json").get("quantization")
    if isinstance(said, dict):  # ModelOpt 0.29 and older, under its later name
        beside["quantization_config"] = {"quant_method": "modelopt", **said}
    return parse_model_config(text, overrides, beside)


def _read_json(file: Path) -> Config:
    try:
        found = json.loads(read_file(file, LARGEST_INDEX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def count_checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in this folder; None where there are none, or the index does not say.

    The index names them (`metadata.total_size`) also where the files themselves are not there. Headers are a few kB.
    """
    metadata = _read_json(folder / "model.safetensors.index.json").get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, int | float) and 0 < total < MOST_BYTES:
        return int(total)
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    try:
        return sum(file.stat().st_size for file in files) or None
    except OSError:
        return None
