"""Print what vLLM's own functions report about models with an encoder; run by vLLM's Python.

Standard input is a list of cases: a config.json and what vLLM is given. Of each: the modality that is profiled, the
tokens of its largest item, and how many of them. What processors of checkpoints would say is put in, as published.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Settings
from typing import Any

import no_images  # noqa: F401 - before vLLM is
from transformers import AutoConfig
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from vllm.model_executor.models.gemma3_mm import Gemma3ProcessingInfo
from vllm.model_executor.models.gemma4_mm import Gemma4ProcessingInfo
from vllm.model_executor.models.mistral3 import Mistral3HFEncoderInfo
from vllm.model_executor.models.mllama4 import Mllama4ProcessingInfo
from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget

IMAGE = {"shortest_edge": 65536, "longest_edge": 16777216}
"""preprocessor_config.json of Qwen3-VL and Qwen3.5."""

VIDEO = {"shortest_edge": 4096, "longest_edge": 25165824}
"""Their video_preprocessor_config.json."""


def info(kind: type, config: Any) -> Any:
    """Return vLLM's way to see a model's inputs, without a checkpoint."""
    processing_info: Any = object.__new__(kind)
    no_limits = Settings(limit_per_prompt={})
    processing_info.ctx = Settings(
        get_merged_mm_kwargs=dict, model_config=Settings(get_multimodal_config=lambda: no_limits, max_model_len=0)
    )
    processing_info.get_hf_config = lambda: config
    processing_info._merge_and_resolve_mm_processor_kwargs = dict
    return processing_info


def gemma3(config: Any) -> dict[str, int]:
    """One image without crops, as the published processor has it."""
    processing_info = info(Gemma3ProcessingInfo, config)
    processing_info.get_num_crops = lambda **_: 0
    processor = Settings(image_seq_length=config.mm_tokens_per_image)
    call_fields = {"image_width": 896, "image_height": 896, "processor": processor, "mm_kwargs": {}}
    return {"image": processing_info.get_num_image_tokens(**call_fields)}


def gemma4(config: Any) -> dict[str, int]:
    """What its own function says."""
    config.vision_config.default_output_length = 280
    config.audio_config = None
    return dict(info(Gemma4ProcessingInfo, config).get_mm_max_tokens_per_item(0, {}))


def qwen(config: Any) -> dict[str, int]:
    """What its own function says, of processors as published."""
    processing_info = info(Qwen3VLProcessingInfo, config)
    video = Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)
    video.__dict__ |= {"size": VIDEO, "temporal_patch_size": 2}
    processing_info.get_image_processor, processing_info.get_video_processor = (
        (lambda: Settings(size=IMAGE)),
        (lambda: video),
    )
    return dict(processing_info.get_mm_max_tokens_per_item(131072, {"image": 1, "video": 1}))


def mistral3(config: Any) -> dict[str, int]:
    """The largest square."""
    size = config.vision_config.image_size
    return {"image": Mistral3HFEncoderInfo(config, size).get_num_image_tokens(image_width=size, image_height=size)}


def llama4(config: Any) -> dict[str, int]:
    """Sixteen tiles and all of the image once more."""
    return {"image": 17 * Mllama4ProcessingInfo.get_patch_per_chunk(config.vision_config)}


KINDS = {"gemma3": gemma3, "gemma4": gemma4, "mistral3": mistral3, "llama4": llama4}


def profiled(case: dict[str, Any]) -> tuple[str, int, int]:
    """Return the modality, the tokens of an item, and the items that vLLM profiles."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(case["config"]))
    config = AutoConfig.from_pretrained(folder)
    tokens = KINDS.get(config.model_type, qwen)(config)
    batch = case["max_num_batched_tokens"]
    settings = Settings(
        max_num_encoder_input_tokens=batch,
        encoder_cache_size=batch,
        disable_chunked_mm_input=False,
        enable_chunked_prefill=True,
        max_num_batched_tokens=batch,
    )
    budget = MultiModalBudget.__new__(MultiModalBudget)
    budget.scheduler_config, budget.mm_max_toks_per_item = settings, tokens
    budget.max_model_len, budget.max_num_reqs = case["max_model_len"], case["max_num_seqs"]
    budget.mm_limits = dict.fromkeys(tokens, 999)
    budget.encoder_compute_budget, budget.encoder_cache_size = compute_mm_encoder_budget(settings, tokens)
    chosen = budget.get_modality_with_max_tokens()
    return chosen, tokens[chosen], budget._get_max_items(chosen, tokens[chosen])[1]


json.dump([profiled(case) for case in json.load(sys.stdin)], sys.stdout)
