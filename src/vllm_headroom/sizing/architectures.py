"""What is known of a type of model beyond the fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_headroom.sizing.fields import Config

KNOWN: Final = frozenset(
    {
        *("arcee", "bert", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe"),
        *("exaone4", "exaone_moe", "falcon", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite"),
        *("granitemoe", "helium", "jamba", "kimi_k2", "laguna", "llama", "llama4_text", "mimo_v2_flash"),
        *("minimax_m2", "ministral3", "mistral", "mixtral", "modernbert", "nemotron_h", "olmo", "olmo2"),
        *("olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text"),
        *("roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "xlm-roberta"),
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
    {"bert", "roberta", "xlm-roberta", "camembert", "modernbert", "nomic_bert", "gte", "new", "ernie", "distilbert"}
)
"""Model types that read a text at once: they keep no keys and values (vLLM, `EncoderOnlyAttentionSpec`)."""

LONGEST_TYPE: Final = 40
"""Characters of a type of model that a sentence shows."""

HEADLESS: Final = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
    "ForEmbedding",
)
"""How classes end that embed or classify: what would give the next token's logits is not loaded."""

HEADED: Final = frozenset({"GPT2LMHeadModel", "ChatGLMModel", "LlavaLlamaModel"})
"""Classes of generating models that end so too."""


def defaults(config: Config) -> Config:
    """Return the fields that this type of model leaves out."""
    return LEFT_OUT.get(str(config.get("model_type")), {})


def unknown_type(config: Config) -> str | None:
    """Return the type of model where it is one that nobody has checked; None where it is known, or not told."""
    kind = config.get("model_type")
    return None if kind is None or str(kind) in KNOWN else str(kind)[:LONGEST_TYPE]


def encodes(config: Config) -> bool:
    """Tell whether the model keeps nothing of a sequence, since every token sees all others."""
    whole_text = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
    return whole_text or str(config.get("model_type")) in ENCODERS


def has_output(config: Config) -> bool:
    """Tell whether the model has weights of its own to give the next token's logits."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if encodes(config) or (name.endswith(HEADLESS) and name not in HEADED):
        return False
    kind = str(config.get("model_type"))
    return not config.get("tie_word_embeddings", kind in TIED or kind.startswith(("gemma3", "gemma4")))
