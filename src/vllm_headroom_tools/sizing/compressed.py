"""How vLLM divides the compressed cache of DeepSeek V4 into blocks."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.units import FLOAT16_BYTES, FLOAT32_BYTES
from vllm_headroom_tools.sizing.config_fields import Config, read_integer, require_integer

COMPRESSED_BLOCK_TOKENS: Final = 256
WINDOW_BLOCK_TOKENS: Final = 64
"""The number of tokens in a block of compressed or window latents. The source is vLLM 0.33,
models/deepseek_v4/compressor.py and v1/attention/backends/mla/sparse_swa.py.
"""

FINE_RATIO: Final = 4
COARSE_RATIO: Final = 128
"""The number of tokens compressed into one latent. A layer with the fine ratio also has an index.
"""

FINE_STATE_TOKENS: Final = 4
COARSE_STATE_TOKENS: Final = 8
"""The number of tokens in a block whose tokens are not compressed yet
(models/deepseek_v4/compressor.py, `block_size`).
"""

PAGE_STEP_BYTES: Final = 576
"""vLLM pads a layer's part of a block to a multiple of this many bytes
(models/deepseek_v4/attention.py).
"""

LATENT_SCALE_BYTES: Final = 8
INDEX_SCALE_VALUES: Final = 128


class WindowedPart(Struct, frozen=True, kw_only=True):
    """Groups of layers that keep only the last tokens of a sequence."""

    groups: int
    block_tokens: int
    # The number of tokens that are kept, not counting tokens in flight.
    window_tokens: int


class CompressedBlocks(Struct, frozen=True, kw_only=True):
    """The division of the cache into blocks, which have the same size in all groups."""

    block_bytes: int
    windowed_parts: tuple[WindowedPart, ...]


class CompressedCache(Struct, frozen=True, kw_only=True):
    """The sizes of a compressed cache, whose layers have one of two compression ratios."""

    layers: int
    fine_layers: int
    coarse_layers: int
    # The size of a latent, and of a vector in the index, in bytes.
    latent_bytes: int
    index_bytes: int
    # The number of values in a latent, and in a vector in the index.
    head_size: int
    index_head_size: int
    window_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that all layers keep for a token outside the window."""
        fine = Fraction(self.fine_layers * (self.latent_bytes + self.index_bytes), FINE_RATIO)
        coarse = Fraction(self.coarse_layers * self.latent_bytes, COARSE_RATIO)
        return ceil(fine + coarse)

    def build_blocks(self, stages: int) -> CompressedBlocks:
        """Return how vLLM 0.33 divides the cache of the largest pipeline stage.

        The compressed latents form a single group. The windows and the compressors' two kinds of
        states form additional groups. Each additional group has about as many layers as the
        latents' group (v1/core/kv_cache_planning.py, `_get_packed_kv_cache_groups`). The block size
        is determined by the largest group. `stages` is the number of pipeline stages.
        """
        # If the layers cannot be divided evenly, the first stages get one layer more. The largest
        # stage counts.
        layers = ceil(self.layers / stages)
        fine_layers = ceil(self.fine_layers / stages)
        coarse_layers = ceil(self.coarse_layers / stages)
        latents_per_block = COMPRESSED_BLOCK_TOKENS // FINE_RATIO
        group_layers = _choose_group_layers((layers, fine_layers, coarse_layers), fine_layers)
        window_groups = ceil(layers / group_layers)
        coarse_groups = ceil(coarse_layers / group_layers)

        compressed_bytes = fine_layers * (
            _pad_page(latents_per_block * self.latent_bytes)
            + _pad_page(latents_per_block * self.index_bytes)
        )
        coarse_latents = COMPRESSED_BLOCK_TOKENS // COARSE_RATIO
        compressed_bytes += coarse_layers * _pad_page(coarse_latents * self.latent_bytes)
        window_bytes = ceil(layers / window_groups) * _pad_page(
            WINDOW_BLOCK_TOKENS * self.latent_bytes
        )
        # A state contains the keys and gates of a latent. With the fine ratio, it contains those of
        # two neighbouring latents.
        fine_token_bytes = 4 * FLOAT32_BYTES
        fine_state_bytes = fine_layers * (
            _pad_page(FINE_STATE_TOKENS * self.head_size * fine_token_bytes)
            + _pad_page(FINE_STATE_TOKENS * self.index_head_size * fine_token_bytes)
        )
        coarse_state_bytes = ceil(coarse_layers / max(1, coarse_groups)) * _pad_page(
            COARSE_STATE_TOKENS * 2 * self.head_size * FLOAT32_BYTES
        )
        return CompressedBlocks(
            block_bytes=max(compressed_bytes, window_bytes, fine_state_bytes, coarse_state_bytes),
            windowed_parts=(
                WindowedPart(
                    groups=window_groups,
                    block_tokens=WINDOW_BLOCK_TOKENS,
                    window_tokens=self.window_tokens,
                ),
                WindowedPart(
                    groups=1 if fine_layers else 0,
                    block_tokens=FINE_STATE_TOKENS,
                    window_tokens=2 * FINE_RATIO,
                ),
                WindowedPart(
                    groups=coarse_groups,
                    block_tokens=COARSE_STATE_TOKENS,
                    window_tokens=COARSE_RATIO,
                ),
            ),
        )


def has_compressed_cache(config: Config) -> bool:
    """Return whether a configuration is for DeepSeek V4, judging by its type or class."""
    classes = config.get("architectures")
    is_class = isinstance(classes, list) and str(classes[:1]).startswith("['DeepseekV4For")
    return is_class or config.get("model_type") == "deepseek_v4"


def read_compressed_cache(config: Config, layer_count: int) -> CompressedCache | None:
    """Return the compressed cache of DeepSeek V4, or None for other models.

    Raises ValueError if a size is missing or vLLM does not support a ratio.
    """
    if not has_compressed_cache(config):
        return None
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layer_count:
        # The list may also have entries for the draft layers, after those of the model.
        raise ValueError("compress_ratios has no ratio for each layer")
    layer_ratios = ratios[:layer_count]
    for ratio in layer_ratios:
        if ratio not in (0, 1, FINE_RATIO, COARSE_RATIO):
            raise ValueError(f"a layer compresses {ratio!r} tokens into one")
    head_size = require_integer(config, "head_dim")
    rotary_size = require_integer(config, "qk_rope_head_dim")
    index_head_size = require_integer(config, "index_head_dim")
    # The values have 8 bits plus scales. The rotary part has 16 bits (vLLM, "fp8_ds_mla").
    latent_bytes = head_size - rotary_size + rotary_size * FLOAT16_BYTES + LATENT_SCALE_BYTES
    return CompressedCache(
        layers=layer_count,
        fine_layers=layer_ratios.count(FINE_RATIO),
        coarse_layers=layer_ratios.count(COARSE_RATIO),
        latent_bytes=latent_bytes,
        index_bytes=index_head_size + index_head_size // INDEX_SCALE_VALUES * FLOAT32_BYTES,
        head_size=head_size,
        index_head_size=index_head_size,
        window_tokens=read_integer(config, "sliding_window") or 0,
    )


def _pad_page(page_bytes: int) -> int:
    return ceil(page_bytes / PAGE_STEP_BYTES) * PAGE_STEP_BYTES


def _choose_group_layers(counts: Sequence[int], least: int) -> int:
    """Return the group size of at least `least` layers that leaves the fewest slots empty.

    If several sizes are equally good, the largest is returned (v1/core/kv_cache_planning.py,
    `_approximate_gcd`).
    """
    best_size = max(1, least)
    best_empty = None
    for size in range(max(1, least), max(counts) + 1):
        empty = sum(-count % size for count in counts)
        if best_empty is None or empty <= best_empty:
            best_empty = empty
            best_size = size
    return best_size
