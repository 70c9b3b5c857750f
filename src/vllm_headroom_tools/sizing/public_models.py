"""Public models by name, with the configuration fields that determine their memory."""

import json
from functools import cache
from pathlib import Path
from typing import Final

from vllm_headroom.inputs import describe_unknown
from vllm_headroom_tools.sizing.config_fields import Config

TABLE: Final = Path(__file__).with_name("public_models.json")
"""A configuration for each model name on the Hugging Face Hub. It has only the fields that are used
here. The file is generated from the public config.json files by `python -m
tests.unit.sizing.reduce_models`.
"""


@cache
def list_public_models() -> dict[str, Config]:
    """Return the configurations by model name, including aliases of the models."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    models: dict[str, Config] = dict(table["models"])
    for alias, name in table["same"].items():
        models[alias] = models[name]
    return models


def find_public_model(name: str) -> Config | str:
    """Return the configuration of the model with this name, or a sentence explaining the failure.

    Case is ignored, and the owner may be omitted if the name is still unique.
    """
    models = list_public_models()
    wanted = name.strip("/").lower()
    for known_name, config in models.items():
        if known_name.lower() == wanted:
            return config
    same_ends = [known for known in models if known.lower().rpartition("/")[2] == wanted]
    # The owner is often omitted, as in "Llama-3.1-8B".
    if len(same_ends) == 1:
        return models[same_ends[0]]
    problem = describe_unknown(name, models, "a model that is known here")
    return f"{problem.removesuffix(', see --help')}; else --model-config with its config.json"
