"""The detector on the corpus of tests/card/corpus: what it finds of each recorded day, and where it is wrong.

Read every half minute, or each minute where the day is long, since all samples take two minutes; a fast leak is read
whole. `make bench-leak` reads all samples of all days. A quarter of the days is held out of this test too: there only
totals are shown.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import judge
import pytest
import recorded
import traces

from tests.conftest import Golden

FIGURES: Final = Path(__file__).with_name("recorded_days.json")
APART_SECONDS: Final = 30.0
LONG_SECONDS: Final = 11 * 3600.0
OPEN: Final = tuple(name for name in recorded.NAMES if name not in recorded.HELD_OUT)
LARGEST_BYTES: Final = 20_000_000


def test_the_verdict_on_each_day_is_as_it_was(golden: Golden) -> None:
    figures = {name: verdict(name) for name in OPEN}

    golden(FIGURES, json.dumps(figures, indent=1) + "\n")


def verdict(name: str) -> dict[str, Any]:
    """Return false alarms and warnings, and of a leak the megabytes it held at the first alarm, None without one."""
    trace = traces.replayed(name, apart=0.0 if "-fast" in name else APART_SECONDS)
    truth = trace.truth
    if truth["ends"] - truth["started"] > LONG_SECONDS:
        trace = traces.Labelled(trace.samples[::2], truth)
    row = judge.judge(trace)
    leaking_figures = {"leaking_at_mb": None if row.get("mb") is None else round(row["mb"])} if truth["leak"] else {}
    return leaking_figures | {"false_leaking": row["false"], "false_growing": row["early_false"]}


def test_the_corpus_is_large_enough_and_small_enough() -> None:
    kinds = Counter(name.split("-")[0] for name in recorded.NAMES)

    assert kinds["ok"] >= 40
    assert kinds["leak"] >= 25
    assert 0.15 < len(recorded.HELD_OUT) / len(recorded.NAMES) < 0.35
    assert sum(path.stat().st_size for path in recorded.FOLDER.iterdir()) < LARGEST_BYTES


@pytest.mark.parametrize("name", ["leak-request", "ok-lengths"])
def test_a_recording_says_what_is_true_of_it(name: str) -> None:
    truth, samples = recorded.read(name)

    assert truth["leak"] == name.startswith("leak-")
    assert truth["ends"] == samples[-1]["t"]
    assert len(truth["t"]) == len(truth["leaked_bytes"])
    assert (truth["leaked_bytes"][-1] > 0) == truth["leak"]
    for sample in samples:
        (gpu,) = sample["gpus"]
        assert gpu["engine"] + gpu["other"] == gpu["used"] <= gpu["total"] - gpu["reserved"]
        assert gpu["reserved_by_torch"] <= gpu["engine"]
