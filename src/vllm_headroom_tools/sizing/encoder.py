"""The encoder of images, video or sound in a model's configuration."""

from typing import Final

from msgspec import Struct

from vllm_headroom_tools.sizing.layers import Config, read_part, read_whole

PARTS: Final = ("vision_config", "audio_config", "visual")
GATES: Final = ("silu", "swish", "swiglu")
"""Activations of encoders whose MLP has a gate."""

HIDDEN: Final = ("hidden_size", "embed_dim", "d_model", "vt_hidden_size")
WIDTH: Final = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")

USUAL_WIDTH: Final = 4
"""Times the hidden size, where the configuration does not give an MLP's width."""


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
    known, largest = [count for count in counts if count is not None], None
    cut, hidden = _cut_largest(config, found[0]), read_whole(found[0], *HIDDEN)
    if cut is not None and hidden is not None:
        tokens, patches, copies = cut
        inside = max(4 * hidden, 3 * (read_whole(found[0], *WIDTH) or USUAL_WIDTH * hidden))
        values = tokens * patches
        largest = EncoderInput(
            tokens=tokens,
            whole_values=2 * values * hidden,
            divided_values=values * inside,
            copies=copies,
        )
    return Encoder(parameters=sum(known) if len(known) == len(counts) else None, largest=largest)


def _count_parameters(found: Config) -> int | None:
    """Return the parameters of layers and of mergers, of two matrices each; None where they are not given."""
    layers = read_whole(
        found, "num_hidden_layers", "depth", "encoder_layers", "vt_num_hidden_layers"
    )
    hidden, width = read_whole(found, *HIDDEN), read_whole(found, *WIDTH)
    if layers is None or hidden is None or width is None:
        return None
    matrices, mergers = 3 if str(found.get("hidden_act")) in GATES else 2, 0
    merged, outputs = read_whole(found, "spatial_merge_size"), read_whole(found, "out_hidden_size")
    if merged is not None and outputs is not None:
        inside = merged**2 * hidden
        mergers = _count_levels(found, []) * inside * (inside + outputs)
    return layers * (4 * hidden * hidden + matrices * hidden * width) + mergers


def _count_levels(vision: Config, usual: list[int]) -> int:
    """Return at how many levels Qwen's encoder is read: at its end, and at each deep stack."""
    stacks = vision.get("deepstack_visual_indexes", usual)
    return 1 + (len(stacks) if isinstance(stacks, list) else 0)


def _cut_largest(config: Config, vision: Config) -> tuple[int, int, int] | None:
    """Return the tokens of the largest image or video, of how many patches each is, and how many copies of it remain.

    By the type of model, what that is to vLLM 0.32 (`get_mm_max_tokens_per_item` and its kin); None for another type.
    """
    match kind := str(config.get("model_type")):
        case "gemma3":
            tokens = read_whole(config, "mm_tokens_per_image") or 256
            return tokens, _count_side(vision, 896, 14) ** 2 // tokens, 1
        case "gemma4":
            tokens = (
                32 * (70 + 8)
            )  # frames of a video, and tokens of each with those that frame it (models/gemma4_mm.py)
            return tokens, (read_whole(vision, "pooling_kernel_size") or 3) ** 2, 1
        case "llama4":
            ratio = vision.get("pixel_shuffle_ratio")
            patches = round(1 / ratio**2) if isinstance(ratio, float) and 0 < ratio <= 1 else 4
            tiles = (
                16 + 1
            )  # of the largest image, and all of it once more (transformers, Llama4ImageProcessor)
            return tiles * _count_side(vision, 336, 14) ** 2 // patches, patches, 1
        case "mistral3":
            merged = read_whole(config, "spatial_merge_size") or 2
            return (_count_side(vision, 1540, 14) // merged) ** 2, merged**2, 1
        case "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            processor, merged = (
                read_part(config, "preprocessor"),
                read_whole(vision, "spatial_merge_size") or 2,
            )
            pixels = read_whole(read_part(processor, "size"), "longest_edge") or read_whole(
                processor, "max_pixels"
            )
            # The image as every published preprocessor_config.json has it; and the largest pair of frames, half of what
            # their video_preprocessor_config.json allows.
            pixels, side = max(pixels or 2**24, 3 * 2**22), read_whole(vision, "patch_size") or 16
            return (
                pixels // (merged * side) ** 2,
                merged**2,
                _count_levels(vision, [8, 16, 24] if "vl" in kind else []),
            )
        case _:
            return None


def _count_side(vision: Config, pixels: int, patch: int) -> int:
    return (read_whole(vision, "image_size") or pixels) // (
        read_whole(vision, "patch_size") or patch
    )
