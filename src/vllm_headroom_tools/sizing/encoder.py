"""The image, video or audio encoder in a model's configuration."""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from vllm_headroom_tools.sizing.config_fields import Config, read_integer, read_mapping

ENCODER_PARTS: Final = ("vision_config", "audio_config", "visual")
"""The parts of a configuration that describe encoders."""

GATED_ACTIVATIONS: Final = ("silu", "swish", "swiglu")
"""Activations of encoders whose MLP has a gate."""

ENCODER_HIDDEN_SIZE: Final = ("hidden_size", "embed_dim", "d_model", "vt_hidden_size")
ENCODER_MLP_WIDTH: Final = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")
ENCODER_LAYERS: Final = ("num_hidden_layers", "depth", "encoder_layers", "vt_num_hidden_layers")

CONFORMER_SQUARES: Final = 24
"""The parameters per layer of Gemma 4's audio encoder, divided by the hidden size squared. Each of
two MLPs has 8. Attention has 5, and the convolutions have 3 (transformers, gemma4).
"""

UNGIVEN_MLP_WIDTH_RATIO: Final = 4
"""The MLP width as a multiple of the hidden size. It is assumed if the configuration has none."""


class EncoderInput(Struct, frozen=True, kw_only=True):
    """The largest image or video, and the number of the encoder's values for it."""

    # The number of tokens that the input takes in the language model's sequence.
    tokens: int
    # Values that every GPU of a tensor-parallel group holds in full.
    replicated_values: int
    # Values that tensor parallelism may divide.
    divided_values: int
    # The number of vectors kept per token, each of the language model's hidden size.
    copies: int


class Encoder(Struct, frozen=True, kw_only=True):
    """A model's encoders; a figure is None if the configuration lacks it."""

    parameters: int | None
    largest_input: EncoderInput | None


class LargestItem(Struct, frozen=True, kw_only=True):
    """The largest image or video that a model accepts, as the model's processor splits it."""

    # The number of tokens that the item takes in the language model's sequence.
    tokens: int
    # The number of patches that the encoder merges into one token.
    patches_per_token: int
    # The number of vectors kept per token, each of the language model's hidden size.
    copies: int = 1


def parse_encoder(config: Config) -> Encoder | None:
    """Return a model's encoders, or None for a text-only model.

    If there are several encoders, the largest input is that of the first one. Raises ValueError for
    a value that is not a size.
    """
    # In Omni models, the encoders are in the thinker part.
    thinker = read_mapping(config, "thinker_config")
    if thinker:
        return parse_encoder(thinker)
    parts = [read_mapping(config, name) for name in ENCODER_PARTS]
    encoders = [part for part in parts if part]
    if not encoders:
        return None
    return Encoder(
        parameters=_sum_parameters(encoders), largest_input=_measure_largest(config, encoders[0])
    )


def _sum_parameters(encoders: list[Config]) -> int | None:
    """Return the total parameters of all encoders, or None if any encoder cannot be counted."""
    counts = [_count_parameters(encoder) for encoder in encoders]
    given_counts = [count for count in counts if count is not None]
    return sum(given_counts) if len(given_counts) == len(counts) else None


def _count_parameters(encoder: Config) -> int | None:
    """Return the parameters of an encoder's layers and mergers.

    Returns None if a size is missing.
    """
    layers = read_integer(encoder, *ENCODER_LAYERS)
    hidden_size = read_integer(encoder, *ENCODER_HIDDEN_SIZE)
    mlp_width = read_integer(encoder, *ENCODER_MLP_WIDTH)
    if layers is None or hidden_size is None:
        return None
    kind = str(encoder.get("model_type"))
    if kind == "gemma4_audio":
        output_width = read_integer(encoder, "output_proj_dims") or 0
        return (layers * CONFORMER_SQUARES * hidden_size + output_width) * hidden_size
    if mlp_width is None:
        return None
    # Queries, keys, values and output.
    attention = 4 * hidden_size * hidden_size
    is_gated = kind == "gemma4_vision" or str(encoder.get("hidden_act")) in GATED_ACTIVATIONS
    mlp = (3 if is_gated else 2) * hidden_size * mlp_width
    # Gemma 4 has a learned vector for each row and each column of an image.
    positions = 2 * (read_integer(encoder, "position_embedding_size") or 0)
    other_parameters = positions * hidden_size + _count_merger_parameters(encoder, hidden_size)
    return layers * (attention + mlp) + other_parameters


def _count_merger_parameters(encoder: Config, hidden_size: int) -> int:
    """Return the parameters of Qwen's mergers, which have two matrices each.

    Returns 0 for other encoders.
    """
    merged_side = read_integer(encoder, "spatial_merge_size")
    output_width = read_integer(encoder, "out_hidden_size")
    if merged_side is None or output_width is None:
        return 0
    merged_width = merged_side**2 * hidden_size
    return _count_levels(encoder) * merged_width * (merged_width + output_width)


DEEP_STACKS: Final = (8, 16, 24)
"""The additional layers of Qwen3-VL's encoder whose output is used. They apply if the configuration
does not list them.
"""


def _count_levels(encoder: Config, usual_stacks: tuple[int, ...] = ()) -> int:
    """Return the number of outputs used in Qwen's encoder.

    The outputs are those of the last layer and of the deep stacks. `usual_stacks` is used if the
    configuration does not list the deep stacks.
    """
    stacks = encoder.get("deepstack_visual_indexes", list(usual_stacks))
    return 1 + (len(stacks) if isinstance(stacks, list) else 0)


def _measure_largest(config: Config, encoder: Config) -> EncoderInput | None:
    """Return an encoder's largest input.

    Returns None if the model type or a size is unknown.
    """
    read_largest_item = LARGEST_ITEM_READERS.get(str(config.get("model_type")))
    if read_largest_item is None:
        return None
    item = read_largest_item(config, encoder)
    hidden_size = read_integer(encoder, *ENCODER_HIDDEN_SIZE)
    if hidden_size is None:
        return None
    mlp_width = read_integer(encoder, *ENCODER_MLP_WIDTH)
    if mlp_width is None:
        mlp_width = UNGIVEN_MLP_WIDTH_RATIO * hidden_size
    patches = item.tokens * item.patches_per_token
    # A patch takes as many values as a token does in a language model's layer. The values are
    # either queries, keys, values and output, or the gate, up and down projections.
    layer_width = max(4 * hidden_size, 3 * mlp_width)
    return EncoderInput(
        tokens=item.tokens,
        # There are two copies of the residual.
        replicated_values=2 * patches * hidden_size,
        divided_values=patches * layer_width,
        copies=item.copies,
    )


# The largest image or video for each model type, as computed by vLLM 0.32. vLLM's functions are
# `get_mm_max_tokens_per_item` and similar ones. The table below lists one function per type.


def _read_gemma_3_item(config: Config, encoder: Config) -> LargestItem:
    tokens = read_integer(config, "mm_tokens_per_image") or 256
    patches = _count_patches_per_side(encoder, usual_pixels=896, usual_patch_pixels=14) ** 2
    return LargestItem(tokens=tokens, patches_per_token=patches // tokens)


GEMMA_4_FRAMES: Final = 32
"""The number of frames in the longest video (models/gemma4_mm.py)."""

GEMMA_4_FRAME_TOKENS: Final = 70 + 8
"""The number of tokens per frame, including the tokens around the frame (models/gemma4_mm.py)."""


def _read_gemma_4_item(_config: Config, encoder: Config) -> LargestItem:
    pooled_side = read_integer(encoder, "pooling_kernel_size") or 3
    return LargestItem(
        tokens=GEMMA_4_FRAMES * GEMMA_4_FRAME_TOKENS, patches_per_token=pooled_side**2
    )


LLAMA_4_TILES: Final = 16 + 1
"""The number of tiles in the largest image, plus one for the whole image (transformers,
Llama4ImageProcessor).
"""


def _read_llama_4_item(_config: Config, encoder: Config) -> LargestItem:
    """Return the largest image for Llama 4, which has the maximum number of tiles."""
    ratio = encoder.get("pixel_shuffle_ratio")
    patches_per_token = 4
    if isinstance(ratio, float) and 0 < ratio <= 1:
        patches_per_token = round(1 / ratio**2)
    patches = _count_patches_per_side(encoder, usual_pixels=336, usual_patch_pixels=14) ** 2
    return LargestItem(
        tokens=LLAMA_4_TILES * patches // patches_per_token, patches_per_token=patches_per_token
    )


def _read_mistral_3_item(config: Config, encoder: Config) -> LargestItem:
    merged_side = read_integer(config, "spatial_merge_size") or 2
    patches_per_side = _count_patches_per_side(encoder, usual_pixels=1540, usual_patch_pixels=14)
    return LargestItem(
        tokens=(patches_per_side // merged_side) ** 2, patches_per_token=merged_side**2
    )


QWEN_IMAGE_PIXELS: Final = 2**24
"""The pixels in the largest image, according to every published preprocessor_config.json."""

QWEN_FRAMES_PIXELS: Final = 3 * 2**22
"""The pixels in the largest pair of frames. They are half of the maximum in published
video_preprocessor_config.json files.
"""


def _read_qwen_3_vl_item(config: Config, encoder: Config) -> LargestItem:
    return _read_qwen_item(config, encoder, usual_stacks=DEEP_STACKS)


def _read_qwen_item(
    config: Config, encoder: Config, usual_stacks: tuple[int, ...] = ()
) -> LargestItem:
    """Return the larger of two inputs.

    The two inputs are an image at the processor's limit and a pair of video frames.
    """
    processor = read_mapping(config, "preprocessor")
    merged_side = read_integer(encoder, "spatial_merge_size") or 2
    # Either of two fields may contain the processor's limit on pixels per image.
    image_pixels = (
        read_integer(read_mapping(processor, "size"), "longest_edge")
        or read_integer(processor, "max_pixels")
        or QWEN_IMAGE_PIXELS
    )
    patch_side = read_integer(encoder, "patch_size") or 16
    pixels = max(image_pixels, QWEN_FRAMES_PIXELS)
    return LargestItem(
        tokens=pixels // (merged_side * patch_side) ** 2,
        patches_per_token=merged_side**2,
        copies=_count_levels(encoder, usual_stacks),
    )


KIMI_IMAGE_PATCHES: Final = 16_384
"""The patches in the largest image, according to published preprocessor_config.json files
(`in_patch_limit`). A video of four frames has at most as many patches. Its patches are merged into
fewer tokens.
"""


def _read_kimi_item(config: Config, _encoder: Config) -> LargestItem:
    media = read_mapping(read_mapping(config, "preprocessor"), "media_proc_cfg")
    patches = read_integer(media, "in_patch_limit") or KIMI_IMAGE_PATCHES
    return LargestItem(tokens=patches // 4, patches_per_token=4)


MINIMAX_VIDEO_TOKENS: Final = 192_000
"""The tokens of the longest video. It has 500 frames of 602,112 pixels (vLLM 0.33,
models/minimax_m3).
"""


def _read_minimax_m3_item(_config: Config, _encoder: Config) -> LargestItem:
    return LargestItem(tokens=MINIMAX_VIDEO_TOKENS, patches_per_token=4)


def _count_patches_per_side(encoder: Config, *, usual_pixels: int, usual_patch_pixels: int) -> int:
    """Return the number of patches along one side of an image.

    Sizes that the configuration lacks fall back to the defaults of the encoder's class.
    """
    pixels = read_integer(encoder, "image_size") or usual_pixels
    patch_pixels = read_integer(encoder, "patch_size") or usual_patch_pixels
    return pixels // patch_pixels


LARGEST_ITEM_READERS: Final[dict[str, Callable[[Config, Config], LargestItem]]] = {
    "gemma3": _read_gemma_3_item,
    "gemma4": _read_gemma_4_item,
    "kimi_k25": _read_kimi_item,
    "kimi_k3": _read_kimi_item,
    "llama4": _read_llama_4_item,
    "minimax_m3_vl": _read_minimax_m3_item,
    "mistral3": _read_mistral_3_item,
    "qwen3_vl": _read_qwen_3_vl_item,
    "qwen3_vl_moe": _read_qwen_3_vl_item,
    "qwen3_5": _read_qwen_item,
    "qwen3_5_moe": _read_qwen_item,
}
"""The function that returns the largest image or video, by model type.

Its arguments are the model's configuration and the encoder's.
"""
