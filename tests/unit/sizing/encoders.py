"""Models with an encoder, and what vLLM is given for each; encoders.json has what its own functions return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.unit.sizing.models import config_text

TRUTH: Final = Path(__file__).parent / "encoders.json"
OURS: Final[dict[str, Any]] = {
    "mistral-small-3.2-24b": {
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "num_hidden_layers": 40},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "patch_size": 14},
    },
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48},
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 1408,
            "image_size": 336,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
        },
    },
}
"""What published configurations report about their encoders, where those in the folders leave it out."""

RECORDED: Final = (
    *("gemma-3-4b-it", "gemma-3-27b-it", "gemma-4-26b-a4b", "gemma-4-31b-it-nvfp4", "qwen3-vl-8b-instruct"),
    *("qwen3-vl-30b-a3b-instruct", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b"),
)
CONFIGS: Final = {**{name: json.loads(config_text(name)) for name in RECORDED}, **OURS}
TOLD: Final[tuple[dict[str, Any], ...]] = tuple(
    {"max_num_batched_tokens": tokens, "max_num_seqs": sequences, "max_model_len": length}
    for tokens in (2048, 8192, 16384, 65536)
    for sequences, length in ((1, 4096), (1, 131072), (256, 4096), (1024, 131072))
)
