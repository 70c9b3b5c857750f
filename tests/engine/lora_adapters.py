"""Write eight adapters with random weights for the tiny model; run by the Python that vLLM is installed in."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
WIDTHS = {"q_proj": (128, 128), "v_proj": (128, 64)}
for number in range(8):
    folder = Path(sys.argv[1]) / f"adapter-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for layer in range(2):
        for name, (inputs, outputs) in WIDTHS.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs).bfloat16()
            weights[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK).bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")
    configuration = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(WIDTHS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
