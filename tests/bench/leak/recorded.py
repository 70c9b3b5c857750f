"""The corpus of tests/card/corpus: torch's real allocator on a stand-in card, real allocations and no kernels."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")
"""A link to the corpus; in a copy of this folder without it there are no recorded days."""

SUFFIX = ".jsonl.xz"
NAMES = tuple(sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}")))
HELD_OUT = frozenset(name for name in NAMES if hashlib.sha256(name.encode()).digest()[0] % 4 == 0)
"""A quarter by name, on which no threshold is chosen: only their totals are shown."""

BY_HOLDER = ("engine", "other")
INSIDE = ("granted", "allocated", "reserved_by_torch", "parts")


TIME = len('{"t":')


def read(name: str, apart: float = 0.0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the truth of a trace, which is in its header, and its samples, `apart` seconds from each other."""
    with lzma.open(FOLDER / f"{name}{SUFFIX}") as file:
        header, *lines = file.readlines()
    truth = json.loads(header)["truth"]
    samples, last_seconds = [], float("-inf")
    for line in lines:
        seconds = float(line[TIME : line.index(b",")])
        if seconds - last_seconds >= apart or line is lines[-1]:
            last_seconds = seconds
            samples.append(json.loads(line))
    return truth, samples


def drop_fields(samples: list[dict[str, Any]], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the samples without some fields of their GPUs."""
    for sample in samples:
        gpus = [{field: value for field, value in gpu.items() if field not in names} for gpu in sample["gpus"] or ()]
        yield sample | {"gpus": gpus or None}
