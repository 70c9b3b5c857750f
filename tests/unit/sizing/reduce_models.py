"""Write the table of public models from a folder of their config.json files.

`python -m tests.unit.sizing.reduce_models FOLDER`, where FOLDER has OWNER--NAME/config.json. A field stays if the
model's shape is another one without it.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

from vllm_headroom_tools.sizing.model_config import parse_model_config
from vllm_headroom_tools.sizing.public_models import TABLE

SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B-Instruct": "meta-llama/Meta-Llama-3.1-405B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mistralai/Mixtral-8x22B-v0.1",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-ai/DeepSeek-V3.2",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
    "moonshotai/Kimi-K2.6": "moonshotai/Kimi-K2.5",
    "moonshotai/Kimi-K2.7-Code": "moonshotai/Kimi-K2.5",
    "Qwen/Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "Qwen/Qwen2.5-32B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "meta-llama/Meta-Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
}
"""Models with the configuration of another one."""


def _dense(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **config_fields: Any) -> dict[str, Any]:
    """Return the fields of a dense model in 16 bits."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **config_fields,
    }


QWEN_2: dict[str, Any] = {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0}
WIDE_QWEN_2: dict[str, Any] = {**QWEN_2, "vocab_size": 152064}
DISTILLED: dict[str, Any] = {**WIDE_QWEN_2, "max_position_embeddings": 131072}
QWEN_3: dict[str, Any] = {**QWEN_2, "head_dim": 128, "max_position_embeddings": 40960}
LLAMA_3: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
TIED: dict[str, Any] = {"tie_word_embeddings": True}

WRITTEN = {
    "Qwen/Qwen2.5-0.5B-Instruct": _dense(896, 4864, 24, 14, 2, **QWEN_2, **TIED),
    "Qwen/Qwen2.5-1.5B-Instruct": _dense(1536, 8960, 28, 12, 2, **QWEN_2, **TIED),
    "Qwen/Qwen2.5-3B-Instruct": _dense(2048, 11008, 36, 16, 2, **QWEN_2, **TIED),
    "Qwen/Qwen2.5-14B-Instruct": _dense(5120, 13824, 48, 40, 8, **WIDE_QWEN_2),
    "Qwen/Qwen2.5-32B-Instruct": _dense(5120, 27648, 64, 40, 8, **WIDE_QWEN_2),
    "Qwen/Qwen2.5-72B-Instruct": _dense(8192, 29568, 80, 64, 8, **WIDE_QWEN_2),
    "Qwen/Qwen3-4B": _dense(2560, 9728, 36, 32, 8, **QWEN_3, **TIED),
    "Qwen/Qwen3-4B-Instruct-2507": _dense(
        2560, 9728, 36, 32, 8, **{**QWEN_3, "max_position_embeddings": 262144}, **TIED
    ),
    "Qwen/Qwen3-14B": _dense(5120, 17408, 40, 40, 8, **QWEN_3),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _dense(3584, 18944, 28, 28, 4, **DISTILLED),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _dense(5120, 13824, 48, 40, 8, **DISTILLED),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _dense(5120, 27648, 64, 40, 8, **DISTILLED),
    "meta-llama/Llama-3.2-1B-Instruct": _dense(2048, 8192, 16, 32, 8, head_dim=64, **LLAMA_3, **TIED),
    "meta-llama/Llama-3.2-3B-Instruct": _dense(3072, 8192, 28, 24, 8, head_dim=128, **LLAMA_3, **TIED),
    "mistralai/Mistral-7B-Instruct-v0.3": _dense(
        4096, 14336, 32, 32, 8, vocab_size=32768, max_position_embeddings=32768, rope_theta=1000000.0
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": _dense(
        5120, 14336, 40, 32, 8, head_dim=128, vocab_size=131072, max_position_embeddings=131072, rope_theta=1000000.0
    ),
}
"""Configurations that are written from the makers' public figures."""


BREAK = ",\n"
LIMIT_BYTES = 5_000
"""Longer ones, with a list of every module that is not quantised, are left out."""

UNREDUCED_LIMIT_BYTES = 50_000
"""Longer ones list the method of every matrix; reducing them takes hours."""


def shape_of(config: dict[str, Any]) -> object:
    return parse_model_config(json.dumps(config))


def reduce(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without the fields that change nothing."""
    reduced = copy.deepcopy(config)
    shape = shape_of(reduced)

    def drop(part: dict[str, Any]) -> None:
        for name in sorted(part):
            value = part.pop(name)
            if shape_of(reduced) != shape:
                part[name] = value
                if isinstance(value, dict):
                    drop(value)

    drop(reduced)
    return reduced


def main(folder: Path) -> None:
    models = {}
    for file in sorted(folder.glob("*--*/config.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        quantisation = file.with_name("hf_quant_config.json")
        if quantisation.exists() and "quantization_config" not in config:
            extra = json.loads(quantisation.read_text(encoding="utf-8")).get("quantization", {})
            config["quantization_config"] = {"quant_method": "modelopt", **extra}
        if len(json.dumps(config)) > UNREDUCED_LIMIT_BYTES or isinstance(shape_of(config), str):
            continue
        reduced = reduce(config)
        if len(json.dumps(reduced)) <= LIMIT_BYTES:
            models[file.parent.name.replace("--", "/", 1)] = reduced
    models |= {name: config for name, config in WRITTEN.items() if name not in models}
    same = {alias: name for alias, name in SAME.items() if name in models and alias not in models}
    lines = [f"{json.dumps(name)}: {json.dumps(config, sort_keys=True)}" for name, config in models.items()]
    TABLE.write_text(f'{{"same": {json.dumps(same)},\n"models": {{\n{BREAK.join(lines)}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
