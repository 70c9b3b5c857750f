"""The encoder of images, video or sound in a model's configuration."""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom_tools.sizing.layers import Config, read_part, read_whole

PARTS: Final = ("vision_config", "audio_config", "visual")
GATES: Final = ("silu", "swish", "swiglu")
"""Activations of encoders whose MLP has a gate."""

HIDDEN: Final = ("hidden_size", "embed_dim", "d_model", "vt_hidden_size")
WIDTH: Final = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")

QWEN_PIXELS: Final = 2**24
"""The largest image, as every published checkpoint of Qwen3-VL and Qwen3.5 has it in preprocessor_config.json."""

QWEN_VIDEO_PIXELS: Final = 3 * 2**22
"""The largest pair of frames: half of what their video_preprocessor_config.json allows."""

GEMMA_VIDEO: Final = (32, 70 + 8)
"""Frames of a video, and tokens of each with those that frame it (vLLM 0.32, models/gemma4_mm.py)."""

LLAMA_TILES: Final = 16 + 1
"""Of the largest image, and all of it once more (transformers, Llama4ImageProcessor)."""

USUAL_WIDTH: Final = 4
"""Times the hidden size, where the configuration does not give an MLP's width."""

Cut = tuple[int, int, int]
"""The tokens of the largest image or video, of how many patches each is, and how many copies of it remain."""


class EncoderInput(Struct, frozen=True, kw_only=True):
    """The largest image or video: its tokens, and the values that encode it.

    The encoder has `whole_values` of it at once, and `divided_values` that tensor parallelism may divide; of the
    language model's hidden size `copies` for each token are left.
    """

    tokens: int
    whole_values: int
    divided_values: int
    copies: int


class Encoder(Struct, frozen=True, kw_only=True):
    """What is known of a model's encoders; None where the configuration does not give it."""

    parameters: int | None
    largest: EncoderInput | None


def parse_encoder(config: Config) -> Encoder | None:
    """Return the encoder; None for a model that reads nothing but text."""
    if thinker := read_part(config, "thinker_config"):
        return parse_encoder(thinker)
    found = [read_part(config, name) for name in PARTS if read_part(config, name)]
    if not found:
        return None
    counts = [_count_parameters(each) for each in found]
    known = [count for count in counts if count is not None]
    return Encoder(
        parameters=sum(known) if len(known) == len(counts) else None, largest=_find_largest(config, found[0])
    )


def _find_largest(config: Config, vision: Config) -> EncoderInput | None:
    cut, hidden = CUTS.get(str(config.get("model_type"))), read_whole(vision, *HIDDEN)
    if cut is None or hidden is None:
        return None
    tokens, patches, copies = cut(config, vision)
    inside = max(4 * hidden, 3 * (read_whole(vision, *WIDTH) or USUAL_WIDTH * hidden))
    values = tokens * patches
    return EncoderInput(tokens=tokens, whole_values=2 * values * hidden, divided_values=values * inside, copies=copies)


def _count_parameters(found: Config) -> int | None:
    """Return the parameters of an encoder's layers; None where its configuration does not give them."""
    layers = read_whole(found, "num_hidden_layers", "depth", "encoder_layers", "vt_num_hidden_layers")
    hidden, width = read_whole(found, *HIDDEN), read_whole(found, *WIDTH)
    if layers is None or hidden is None or width is None:
        return None
    matrices = 3 if str(found.get("hidden_act")) in GATES else 2
    return layers * (4 * hidden * hidden + matrices * hidden * width) + _count_mergers(found, hidden)


def _count_mergers(found: Config, hidden: int) -> int:
    """Return the parameters of Qwen's mergers, of two matrices each: one at the end, and one for each deep stack."""
    merged, outputs = read_whole(found, "spatial_merge_size"), read_whole(found, "out_hidden_size")
    if merged is None or outputs is None:
        return 0
    inside, levels = merged**2 * hidden, found.get("deepstack_visual_indexes")
    return (1 + (len(levels) if isinstance(levels, list) else 0)) * inside * (inside + outputs)


def _cut_gemma3(config: Config, vision: Config) -> Cut:
    tokens, side = read_whole(config, "mm_tokens_per_image") or 256, _count_side(vision, 896, 14)
    return tokens, side * side // tokens, 1


def _cut_gemma4(_: Config, vision: Config) -> Cut:
    frames, tokens = GEMMA_VIDEO
    return frames * tokens, (read_whole(vision, "pooling_kernel_size") or 3) ** 2, 1


def _cut_qwen(config: Config, vision: Config) -> Cut:
    merged = read_whole(vision, "spatial_merge_size") or 2
    processor = read_part(config, "preprocessor")
    pixels = (
        read_whole(read_part(processor, "size"), "longest_edge") or read_whole(processor, "max_pixels") or QWEN_PIXELS
    )
    tokens = max(pixels, QWEN_VIDEO_PIXELS) // (merged * (read_whole(vision, "patch_size") or 16)) ** 2
    levels = vision.get("deepstack_visual_indexes", [8, 16, 24] if "vl" in str(config.get("model_type")) else [])
    return tokens, merged**2, 1 + (len(levels) if isinstance(levels, list) else 0)


def _cut_mistral(config: Config, vision: Config) -> Cut:
    merged = read_whole(config, "spatial_merge_size") or 2
    return (_count_side(vision, 1540, 14) // merged) ** 2, merged**2, 1


def _cut_llama(_: Config, vision: Config) -> Cut:
    ratio = vision.get("pixel_shuffle_ratio")
    patches = round(1 / ratio**2) if isinstance(ratio, float) and 0 < ratio <= 1 else 4
    return LLAMA_TILES * _count_side(vision, 336, 14) ** 2 // patches, patches, 1


def _count_side(vision: Config, pixels: int, patch: int) -> int:
    return (read_whole(vision, "image_size") or pixels) // (read_whole(vision, "patch_size") or patch)


CUTS: Final[Mapping[str, Callable[[Config, Config], Cut]]] = {
    "gemma3": _cut_gemma3,
    "gemma4": _cut_gemma4,
    "llama4": _cut_llama,
    "mistral3": _cut_mistral,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _cut_qwen),
}
"""By the type of model, what its largest image or video is to vLLM 0.32 (`get_mm_max_tokens_per_item` and its kin)."""
