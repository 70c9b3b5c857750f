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
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
}
"""Models with the configuration of another one."""

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
    same = {alias: name for alias, name in SAME.items() if name in models and alias not in models}
    lines = [f"{json.dumps(name)}: {json.dumps(config, sort_keys=True)}" for name, config in models.items()]
    TABLE.write_text(f'{{"same": {json.dumps(same)},\n"models": {{\n{BREAK.join(lines)}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
