"""The largest that fits: how long so many sequences can be, and how many fit of such a length."""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.plan.estimate import Estimate

SEQUENCES: Final = (1, 4, 16, 64, 256, 1024)
LENGTHS: Final = (1024, 4096, 16384, 65536, 262144)


def longest(found: Estimate) -> list[tuple[int, int]]:
    """Return for several `max_num_seqs` the largest `max_model_len` that all can use up at once; 0 for none."""
    asked = found.question.max_num_seqs
    counts = sorted({count for count in SEQUENCES if count <= asked} | {asked})
    return [(count, length) for count in counts if (length := found.longest(count)) is not None]


def most(found: Estimate) -> list[tuple[int, int]]:
    """Return for several `max_model_len`, up to what one sequence can have, how many can use it up at once."""
    limit, asked = found.longest(1) or 0, found.question.max_model_len
    lengths = sorted({length for length in LENGTHS if length <= limit} | ({asked} if asked is not None else set()))
    return [(length, int(count)) for length in lengths if (count := found.sequences(length)) is not None]
