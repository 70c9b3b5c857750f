"""Two traces side by side: what grew, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.check.checking import check, document
from tests.unit.commands.check.engine_traces import HELD, MIB, TOTAL, engine, write_trace

GPU, HOST, KV = "GPU memory over baseline", "host memory over baseline", "KV cache against baseline"


def compared(folder: Path, new: dict[str, Any], old: dict[str, Any], share: str = "5%") -> tuple[int, dict[str, Any]]:
    """Return the exit status and the judgements by limit; of several on one limit, the last."""
    traces = (
        "--trace",
        write_trace(folder / "new", engine(**{"hours": 0.5, **new})),
        "--baseline",
        write_trace(folder / "old", engine(**{"hours": 0.5, **old})),
    )
    status, report = document(*traces, "--max-growth-over-baseline", share)
    return status, {limit["limit"]: limit for limit in report["limits"]}


def test_the_same_twice_passes(tmp_path: Path) -> None:
    status, limits = compared(tmp_path, {}, {})

    assert status == 0
    assert {name: judgement["value"] == judgement["baseline"] for name, judgement in limits.items()} == {
        "engine restarts": True,
        GPU: True,
        HOST: True,
        KV: True,
    }


def test_memory_that_grew_fails_and_the_limit_itself_is_kept(tmp_path: Path) -> None:
    new = {"held_bytes": HELD + HELD // 20}
    below, at, above = (compared(tmp_path, new, {}, share)[1][GPU] for share in ("4.9%", "5%", "6%"))

    assert [judgement["outcome"] for judgement in (below, at, above)] == ["failed", "passed", "passed"]
    assert (below["value"], below["baseline"]) == (pytest.approx(1.05 * HELD), HELD)
    assert below["most"] == pytest.approx(1.049 * HELD)


def test_a_smaller_kv_cache_fails(tmp_path: Path) -> None:
    status, limits = compared(tmp_path, {"capacity": 940_000}, {})

    assert (status, limits[GPU]["outcome"]) == (1, "passed")
    assert (limits[KV]["outcome"], limits[KV]["value"], limits[KV]["least"]) == ("failed", 940_000, 950_000)


def test_host_memory_that_grew_fails(tmp_path: Path) -> None:
    status, limits = compared(tmp_path, {"host_leak": 50e6}, {})

    assert (status, limits[HOST]["outcome"], limits[GPU]["outcome"]) == (1, "failed", "passed")


@pytest.mark.parametrize(
    ("new", "old", "why"),
    [
        ({"model": "n"}, {}, "the baseline is of another model: m there, n here"),
        ({}, {"gpus": 2}, "the baseline has 2 GPUs, this trace 1"),
        ({}, {"total": TOTAL // 2}, "the baseline is of another kind of GPU: 39.1 GiB there, 78.1 GiB here"),
        ({"running": 80.0}, {}, "no load in common: 80 running here, 40 running in the baseline"),
        (
            {},
            {"hours": 0.1},
            "the baseline: the trace is too short: 5 min 55 s, and a limit needs 10 min",
        ),
        ({"hours": 0.1}, {}, "the trace is too short: 5 min 55 s, and a limit needs 10 min"),
    ],
)
def test_what_cannot_be_compared_is_unknown(tmp_path: Path, new: dict[str, Any], old: dict[str, Any], why: str) -> None:
    status, limits = compared(tmp_path, {"held_bytes": HELD + 9000 * MIB, **new}, old)

    assert (status, limits[GPU]["outcome"], limits[GPU]["why"]) == (2, "cannot_tell", why)


@pytest.mark.parametrize(
    ("new", "old", "why"),
    [(None, 10**6, "only the baseline has it"), (10**6, None, "the baseline does not have it")],
)
def test_a_figure_that_one_trace_lacks_is_unknown(tmp_path: Path, new: int | None, old: int | None, why: str) -> None:
    status, limits = compared(tmp_path, {"capacity": new}, {"capacity": old})

    assert (status, limits[KV]["outcome"], limits[KV]["why"]) == (2, "cannot_tell", why)


def test_figures_that_neither_has_are_not_asked_for(tmp_path: Path) -> None:
    assert KV not in compared(tmp_path, {"capacity": None}, {"capacity": None})[1]


def test_the_greatest_growth_among_the_loads_in_common_counts(tmp_path: Path) -> None:
    def stepped(grown: int) -> str:
        samples = []
        for number, sample in enumerate(engine(0.7)):
            busy = number > 250
            held_bytes = HELD + (grown if busy else 0)
            gpu = {**sample["gpus"][0], "used": held_bytes, "engine": held_bytes}
            samples.append(
                {**sample, "gpus": [gpu], "engines": [{**sample["engines"][0], "running": 80 if busy else 20}]}
            )
        return write_trace(tmp_path / str(grown), iter(samples))

    _, report = document("--trace", stepped(7000 * MIB), "--baseline", stepped(0), "--max-growth-over-baseline", "5%")
    (gpu,) = (limit for limit in report["limits"] if limit["limit"] == GPU)

    assert (gpu["outcome"], gpu["value"]) == ("failed", HELD + 7000 * MIB)
    assert gpu["why"] == "at 80 running, and 80 in the baseline"


def test_the_gpus_of_another_machine_are_matched_by_their_place(tmp_path: Path) -> None:
    def renamed() -> str:
        samples = (
            {**sample, "gpus": [{**gpu, "uuid": f"GPU-other-{gpu['gpu']}"} for gpu in sample["gpus"]]}
            for sample in engine(0.5, gpus=2)
        )
        return write_trace(tmp_path / "old", samples)

    new = write_trace(tmp_path / "new", engine(0.5, gpus=2))
    status, _ = document("--trace", new, "--baseline", renamed(), "--max-growth-over-baseline", "5%")

    assert status == 0


def test_the_table_has_the_baseline_beside(tmp_path: Path) -> None:
    new = write_trace(tmp_path / "new", engine(0.5, held_bytes=HELD + HELD // 10))
    old = write_trace(tmp_path / "old", engine(0.5))
    process = check("--trace", new, "--baseline", old, "--max-growth-over-baseline", "5%")

    assert process.returncode == 1
    assert process.stdout.splitlines() == [
        f"{new}: 360 samples over 29 min 55 s, 35,900 requests finished",
        f"{old}: 360 samples over 29 min 55 s, 35,900 requests finished",
        "",
        "             limit                      of           found                     at most  baseline",
        "passed       engine restarts                         0                         0        0",
        "FAILED       GPU memory over baseline   GPU 0        75.2 GiB, +10.00%         5% more  68.4 GiB",
        "             at 40 running, and 40 in the baseline",
        "passed       host memory over baseline  engine_core  2.93 GiB, +0.00%          5% more  2.93 GiB",
        "             at 40 running, and 40 in the baseline",
        "passed       KV cache against baseline  engine 0     1,000,000 tokens, +0.00%  5% less  1,000,000 tokens",
        "",
        "FAILED: 1 of 4 limits exceeded.",
    ]
