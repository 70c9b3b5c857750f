"""How many bytes of KV cache a sequence takes, where layers keep every token, a window or a state."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from vllm_headroom.sizing.footprint import layer_bytes
from vllm_headroom.sizing.shape import ModelShape

ALIKE: Final = 1.5
"""Up to this ratio of their numbers, vLLM pads the rarer kind of layers to groups as large as the other's."""

STATE_BLOCKS: Final = 2
"""For a state: the running one, and one for prefix caching (`MambaSpec.max_memory_usage_bytes`, mode "align")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """vLLM's cut of one GPU's KV cache: blocks of equal size, each for `block_tokens` of `block_layers`, a group.

    A sequence takes a block of every full group for each `block_tokens`, of every windowed group for those of its last
    `window_tokens`, and a fixed number for its states.
    """

    block_tokens: int
    block_layers: int
    block_bytes: int
    full_groups: int
    windowed_groups: int
    window_tokens: int
    state_blocks: int

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens takes."""
        full = ceil(tokens / self.block_tokens)
        windowed = min(full, ceil(self.window_tokens / self.block_tokens)) + 1
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
    v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`). A window is longer by `in_flight_tokens`,
    those that are scheduled and not yet settled (v1/kv_cache_interface.py,
    `SlidingWindowSpec.max_admission_blocks_per_request`). Where layers keep a state, a block has as many tokens as it
    takes to hold one (platforms/interface.py, `_align_hybrid_block_size`); a state whose size is not known counts as no
    larger than a block.
    """
    layer = layer_bytes(shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    if layer is None:
        return None
    counts = [
        ceil(count / pipeline_parallel) for count in (shape.full_layers, shape.windowed_layers, shape.stateful_layers)
    ]
    there = [count for count in counts if count]
    group = max(there) if max(there) < ALIKE * min(there) else min(there)
    full, windowed, stateful = (ceil(count / group) for count in counts)
    state_tokens = ceil((shape.state_bytes or 0) / tensor_parallel / layer)
    tokens = block_tokens * max(1, ceil(state_tokens / block_tokens))
    return KvLayout(
        block_tokens=tokens,
        block_layers=group,
        block_bytes=group * tokens * layer,
        full_groups=full,
        windowed_groups=windowed,
        window_tokens=(shape.window_tokens or 0) - 1 + in_flight_tokens,
        state_blocks=STATE_BLOCKS * stateful,
    )
