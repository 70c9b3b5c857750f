"""torch's caching allocator: pools, segments, free lists, splits and merges (c10/cuda/CUDACachingAllocator.cpp).

Blocks of up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments
of exactly their size. Freed blocks are merged with free neighbours and kept. When the card is full, whole free segments
are given back and the request is tried again. With expandable segments there is one segment per pool that grows at
its end by 2 or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from simulator.card import MIB, Card, CardFullError, rounded

SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
OWN_SEGMENT: Final = 10 * MIB
QUANTUM: Final = 512


class Block:
    """A part of a segment; `before` and `after` are its neighbours there, `mapped` is False where it was given back."""

    __slots__ = ("after", "before", "free", "mapped", "number", "pool", "size")

    def __init__(self, pool: Pool, size: int, number: int) -> None:
        self.pool, self.size, self.number = pool, size, number
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False
        self.mapped = True


class Pool:
    """The free blocks of one kind, by size; and those whose memory was given back."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.holes: list[Block] = []
        self.tail: Block | None = None

    def least_rest(self) -> int:
        """Return how much must be left over for a block to be split."""
        return QUANTUM if self.small else SMALL


class Allocator:
    """The allocator of one process on one card; `reserved` is what it took, `allocated` what is in use."""

    def __init__(self, card: Card, *, expandable: bool = False) -> None:
        self.card, self.expandable = card, expandable
        self.reserved = self.allocated = self.retries = self._stranded = 0
        self._pools = Pool(small=True), Pool(small=False)
        self._numbers = 0

    def malloc(self, size: float) -> Block:
        """Return a block of at least this size; raises CardFullError."""
        wanted = max(QUANTUM, rounded(size, QUANTUM))
        pool = self._pools[0 if wanted <= SMALL else 1]
        block = self._fit(pool, wanted) or self._segment(pool, wanted)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._segment(pool, wanted)
            if block is None:
                raise CardFullError
        self._split(block, wanted)
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        self.allocated -= block.size
        block.free = True
        for adjacent in (block.before, block.after):
            if adjacent is not None and adjacent.free and adjacent.mapped:
                self._unlist(adjacent)
                block = self._merged(block, adjacent)
        insort(block.pool.free, (block.size, block.number, block))

    @property
    def inactive_split(self) -> int:
        """What is free in segments of which a part is in use, and cannot be given back."""
        split = (block for pool in self._pools for _, _, block in pool.free if block.before or block.after)
        return self._stranded + sum(block.size for block in split)

    def strand(self, size: int, used: int) -> None:
        """Take a segment of which so little stays in use, and whose rest fits nothing that is requested again."""
        if not self._take(size):
            raise CardFullError
        self.allocated += used
        self._stranded += size - used

    def empty_cache(self) -> None:
        """Give back what is wholly free: segments, or with expandable segments whole pages."""
        for pool in self._pools:
            pool.free = sorted(entry for listed in pool.free for entry in self._emptied(listed[2]))

    def _emptied(self, block: Block) -> list[tuple[int, int, Block]]:
        """Return what stays free and mapped of a free block."""
        if self.expandable:
            return self._unmapped(block)
        if block.before is not None or block.after is not None:
            return [(block.size, block.number, block)]
        self._give(block.size)
        return []

    def _fit(self, pool: Pool, wanted: int) -> Block | None:
        at = bisect_left(pool.free, (wanted, 0))
        if at == len(pool.free):
            return None
        block = pool.free.pop(at)[2]
        block.free = False
        return block

    def _segment(self, pool: Pool, wanted: int) -> Block | None:
        if self.expandable:
            return self._expand(pool, wanted)
        size = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if wanted < OWN_SEGMENT else rounded(wanted)
        return self._new(pool, size) if self._take(size) else None

    def _expand(self, pool: Pool, wanted: int) -> Block | None:
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        for hole in pool.holes:
            if hole.size >= wanted:
                size = min(hole.size, rounded(wanted, page))
                return self._remapped(hole, size) if self._take(size) else None
        tail = pool.tail if pool.tail is not None and pool.tail.free and pool.tail.mapped else None
        missing = rounded(wanted - (tail.size if tail else 0), page)
        if not self._take(missing):
            return None
        fresh = self._new(pool, missing)
        fresh.before, previous_tail = pool.tail, pool.tail
        if previous_tail is not None:
            previous_tail.after = fresh
        pool.tail = fresh
        if tail is None:
            return fresh
        self._unlist(tail)
        merged = self._merged(fresh, tail)
        merged.free = False
        return merged

    def _remapped(self, hole: Block, size: int) -> Block:
        hole.pool.holes.remove(hole)
        hole.mapped, hole.free = True, False
        remainder = self._cut(hole, size)
        if remainder is not None:
            remainder.mapped, remainder.free = False, True
            hole.pool.holes.append(remainder)
        return hole

    def _unmapped(self, block: Block) -> list[tuple[int, int, Block]]:
        page = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        whole_bytes = block.size // page * page
        if not whole_bytes:
            return [(block.size, block.number, block)]
        remainder = self._cut(block, whole_bytes)
        self._give(whole_bytes)
        block.mapped = False
        block.pool.holes.append(block)
        if remainder is None:
            return []
        remainder.free = True
        return [(remainder.size, remainder.number, remainder)]

    def _split(self, block: Block, wanted: int) -> None:
        if block.size - wanted >= block.pool.least_rest():
            remainder = self._cut(block, wanted)
            if remainder is not None:
                remainder.free = True
                insort(block.pool.free, (remainder.size, remainder.number, remainder))

    def _cut(self, block: Block, size: int) -> Block | None:
        if block.size == size:
            return None
        remainder = self._new(block.pool, block.size - size)
        block.size = size
        remainder.before, remainder.after, block.after = block, block.after, remainder
        if remainder.after is not None:
            remainder.after.before = remainder
        if block.pool.tail is block:
            block.pool.tail = remainder
        return remainder

    def _merged(self, block: Block, adjacent: Block) -> Block:
        left_block, right = (adjacent, block) if block.before is adjacent else (block, adjacent)
        left_block.size += right.size
        left_block.after = right.after
        if right.after is not None:
            right.after.before = left_block
        if left_block.pool.tail is right:
            left_block.pool.tail = left_block
        left_block.free = True
        return left_block

    def _new(self, pool: Pool, size: int) -> Block:
        self._numbers += 1
        return Block(pool, size, self._numbers)

    def _unlist(self, block: Block) -> None:
        free = block.pool.free
        free.pop(bisect_left(free, (block.size, block.number)))

    def _take(self, size: int) -> bool:
        is_taken = self.card.take(size)
        self.reserved += size if is_taken else 0
        return is_taken

    def _give(self, size: int) -> None:
        self.card.give(size)
        self.reserved -= size
