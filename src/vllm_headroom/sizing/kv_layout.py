"""How many bytes of KV cache a sequence takes, where layers keep every token, a window or a state."""

from __future__ import annotations

from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.sizing.footprint import layer_bytes
from vllm_headroom.sizing.shape import ModelShape

ALIKE: Final = 1.5
"""Up to this ratio of their numbers, vLLM pads the rarer kind of layers to groups as large as the other's."""

STATE_BLOCKS: Final = 2
"""For a state: the running one, and one for prefix caching (`MambaSpec.max_memory_usage_bytes`, mode "align").

Mamba-2 keeps one more, at the end of the prompt (model_executor/layers/mamba/mamba_mixer2.py, `get_kv_cache_spec`).
"""

LATENT_BLOCK: Final = 128
"""Tokens that a block of latent attention beside states is a multiple of (`_align_hybrid_block_size`)."""


class KvLayout(Struct, frozen=True, kw_only=True):
    """vLLM's cut of one GPU's KV cache: blocks of equal size, each for the tokens of `block_layers`, a group.

    A sequence takes a block of every full group for each `block_tokens`, of every windowed group one for each
    `windowed_block_tokens` of its last `window_tokens` and `window_ends` more, and a fixed number for its states. A
    model that keeps nothing has blocks of 0 bytes, and takes none.
    """

    block_tokens: int
    block_layers: int
    block_bytes: int
    full_groups: int
    windowed_groups: int
    windowed_block_tokens: int
    window_tokens: int
    window_ends: int
    state_blocks: int

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens takes."""
        full = ceil(tokens / self.block_tokens)
        windowed = ceil(min(tokens, self.window_tokens) / self.windowed_block_tokens) + self.window_ends
        return self.full_groups * full + self.windowed_groups * windowed + self.state_blocks

    def longest(self, blocks: int, ceiling: int) -> int:
        """Return the most tokens, at most `ceiling`, of a sequence that takes no more than so many blocks; 0 for none.

        In a window only, a sequence can be as long as one likes.
        """
        low, high = 0, ceil(ceiling / self.block_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle * self.block_tokens) <= blocks else (low, middle - 1)
        return min(ceiling, low * self.block_tokens)


def kv_layout(
    shape: ModelShape,
    *,
    block_tokens: int,
    in_flight_tokens: int,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> KvLayout | None:
    """Return the cut of the KV cache; None for a dtype not known here.

    Groups are as large as the rarest kind of layers, so that all blocks are equal (vLLM 0.32,
    v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`); layers that keep less of a token have more
    tokens in a block (`unify_kv_cache_spec_page_size`). A window is longer by `in_flight_tokens`, those that are
    scheduled and not yet settled (v1/kv_cache_interface.py, `max_admission_blocks_per_request`), and may begin within a
    block; a chunk begins with one. Where layers keep a state, a block has as many tokens as it takes to hold one
    (platforms/interface.py, `_align_hybrid_block_size`); a state whose size is not known counts as no larger than a
    block.
    """
    layer = layer_bytes(shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    windowed_layer = layer_bytes(shape, shape.windowed_heads, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    if layer is None or windowed_layer is None:
        return None
    counts = [
        ceil(count / pipeline_parallel) for count in (shape.full_layers, shape.windowed_layers, shape.stateful_layers)
    ]
    there = [count for count in counts if count] or [0]
    group = max(there) if max(there) < ALIKE * min(there) else min(there)
    full, windowed, stateful = (ceil(count / group) if count else 0 for count in counts)
    tokens = _state_tokens(shape, layer, block_tokens, tensor_parallel)
    page = max(layer if full else 0, windowed_layer if windowed else 0) * tokens
    return KvLayout(
        block_tokens=tokens * _times(page, layer * tokens),
        block_layers=group,
        block_bytes=group * page,
        full_groups=full,
        windowed_groups=windowed,
        windowed_block_tokens=tokens * _times(page, windowed_layer * tokens),
        window_tokens=(shape.window_tokens or 0) - (0 if shape.chunked else 1) + in_flight_tokens,
        window_ends=0 if shape.chunked else 1,
        state_blocks=(STATE_BLOCKS + shape.state_checkpoints) * stateful,
    )


def _state_tokens(shape: ModelShape, layer: int, block_tokens: int, tensor_parallel: int) -> int:
    least = max(block_tokens, LATENT_BLOCK) if shape.latent_width and shape.stateful_layers else block_tokens
    return least * max(1, ceil(ceil((shape.state_bytes or 0) / tensor_parallel) / layer / least))


def _times(page: int, own: int) -> int:
    """Return how many of its own pages a layer's page holds: those that do not divide it are padded to it."""
    return page // own if own and page and page % own == 0 else 1
