"""The series of a trace as OpenMetrics: what the daemon would have exported, in a form that promtool takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.openmetrics.parser import text_fd_to_metric_families

from tests.command import run_command
from tests.played import play
from tests.unit.commands.replay.traces import BEGAN, HEADER, MIB, STEP, flat, leaking, sample, text
from vllm_headroom import catalog
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom_tools.demo.world import TABLE
from vllm_headroom_tools.replay import openmetrics

MEMORY: Final = Path(__file__).parents[3] / "contract" / "memory"
SCRAPED: Final = {("job", "vllm-headroom"), ("instance", "replay")}

Series = dict[tuple[str, frozenset[tuple[str, str]]], dict[float, float]]
"""Values by time of each series, by its name and its own labels."""


def export(file: Path, trace: str, *words: str) -> Series:
    """Return the series that `replay` writes, as an OpenMetrics parser reads them; it refuses mixed ones."""
    done = run_command("replay", "-", "--openmetrics", str(file), *words, stdin=trace)
    assert (done.returncode, done.stderr) == (0, "")
    return parse(file)


def parse(file: Path) -> Series:
    series: Series = {}
    with file.open(encoding="utf-8") as lines:
        for family in text_fd_to_metric_families(lines):  # type: ignore[no-untyped-call]
            for point in family.samples:
                labels = set(point.labels.items())
                assert labels >= SCRAPED
                key = (point.name, frozenset(labels - SCRAPED))
                series.setdefault(key, {})[float(point.timestamp)] = point.value
    return series


def named(series: Series, name: str, **labels: str) -> dict[float, float]:
    return series[name, frozenset(labels.items())]


def test_each_sample_has_its_values_at_its_time(tmp_path: Path) -> None:
    series = export(tmp_path / "series.txt", text(leaking(2.0)))

    times = [BEGAN + step * STEP for step in range(1440)]
    used = named(series, "headroom_gpu_memory_used_bytes", gpu="0", uuid="GPU-a")
    leak = named(series, "headroom_leak_state", gpu="0", uuid="GPU-a", state="leaking")
    assert [*used] == [*leak] == [*named(series, "up")] == times
    assert used[times[0]] == 70_002 * MIB
    assert (leak[times[0]], leak[times[-1]]) == (0.0, 1.0)
    assert named(series, "headroom_situation", situation="leaking")[times[-1]] == 1.0


def test_the_answer_is_the_same_with_the_option(tmp_path: Path) -> None:
    trace = text(leaking(1.5))
    words = ("replay", "-", "--json")

    with_option = run_command(*words, "--openmetrics", str(tmp_path / "series.txt"), stdin=trace)

    assert with_option.stdout == run_command(*words, stdin=trace).stdout


def test_the_operators_figure_is_compared_with_what_is_held(tmp_path: Path) -> None:
    trace = text(leaking(0.1))

    series = export(tmp_path / "series.txt", trace, "--reported-bytes", "68GiB")

    reported = named(series, "headroom_memory_reported_bytes", gpu="0", uuid="GPU-a", basis="configured")
    assert set(reported.values()) == {68 * 1024 * MIB}
    assert ("headroom_memory_reported_bytes", frozenset()) not in export(tmp_path / "none.txt", trace)


NOT_RECORDED: Final = {
    catalog.BUILD_INFO.name,
    catalog.GPU_INFO.name,  # the name of the card
    catalog.GPU_POWER.name,
    catalog.GPU_TEMPERATURE.name,
    catalog.INPUT_AVAILABLE.name,
    catalog.SAMPLE_SKEW.name,
    catalog.SOURCE_READ_SECONDS.name,
    catalog.ENGINE_KV_BYTES_PER_REQUEST.name,  # with HEADROOM_KV_BYTES_PER_TOKEN, as in what is played
    catalog.ENGINE_KV_CAPACITY_BYTES.name,
}


@pytest.mark.parametrize("scenario", ["leak", "crash"])
def test_it_is_what_the_daemon_exported(scenario: str, tmp_path: Path) -> None:
    lines: list[str] = []
    exported: Series = {}
    for sampler in play(TABLE[scenario], 2.2, began=BEGAN):
        assert sampler.latest is not None
        snapshot = sampler.latest.snapshot
        lines.append(encode_line(build_record(snapshot)).decode())
        for metric, values, value in sampler.latest.published.samples:
            key = (metric.name, frozenset(zip(metric.labels, values, strict=True)))
            exported.setdefault(key, {})[snapshot.time_seconds] = value

    series = export(tmp_path / "series.txt", "".join([f"{HEADER}\n", *lines]))

    differing = sorted({name for (name, _) in differences(exported, series)})
    assert not differing, differing


def differences(exported: Series, series: Series) -> Iterator[tuple[str, frozenset[tuple[str, str]]]]:
    for key, points in exported.items():
        if key[0] not in NOT_RECORDED and series.get(key) != pytest.approx(points):
            yield key


def test_a_series_that_disappears_ends(tmp_path: Path) -> None:
    records = [*islice(flat(1.0), 10), *(sample(BEGAN + step * STEP, None) for step in range(10, 20))]

    series = export(tmp_path / "series.txt", text(records))

    assert len(named(series, "headroom_gpu_memory_used_bytes", gpu="0", uuid="GPU-a")) == 10
    assert [*named(series, "headroom_source_up", source="nvml").values()] == 10 * [1.0] + 10 * [0.0]
    assert named(series, "headroom_source_failures_total", source="nvml", reason="unknown")[BEGAN + 19 * STEP] == 10


def test_points_that_went_to_the_disk_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = text(islice(flat(1.0), 100))
    in_memory = export(tmp_path / "memory.txt", trace)
    monkeypatch.setattr(openmetrics, "MOST_BUFFERED_POINTS", 1_000)

    assert export(tmp_path / "spooled.txt", trace) == in_memory
    assert (tmp_path / "spooled.txt").read_bytes() == (tmp_path / "memory.txt").read_bytes()


def test_samples_after_a_clock_was_set_back_are_left_out_until_it_has_caught_up(tmp_path: Path) -> None:
    records = [*islice(flat(1.0), 20)]
    for place, record in enumerate(records[10:], start=5):
        record["t"] = BEGAN + place * STEP

    series = export(tmp_path / "series.txt", text(records))

    assert [*named(series, "up")] == [BEGAN + step * STEP for step in range(15)]


def test_labels_are_escaped(tmp_path: Path) -> None:
    name = 'a "model"\\with quotes'
    records: Iterable[dict[str, Any]] = [*islice(flat(1.0), 3)]
    for record in records:
        record["engines"][0]["model_name"] = name

    series = export(tmp_path / "series.txt", text(records))

    assert len(named(series, "headroom_engine_requests_running", model_name=name, engine="0")) == 3


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "none" / "series.txt"

    done = run_command("replay", "-", "--openmetrics", str(file), stdin=text(islice(flat(1.0), 3)))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"vllm-headroom replay: --openmetrics {file}: cannot be written: No such file or directory\n"


def test_a_temporary_file_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(openmetrics, "MOST_BUFFERED_POINTS", 10)
    monkeypatch.setattr(openmetrics, "TemporaryFile", fail)

    done = run_command("replay", "-", "--openmetrics", str(tmp_path / "series.txt"), stdin=text(islice(flat(1.0), 3)))

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "temporary file cannot be written, TMPDIR may name another directory: No space left" in done.stderr


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH: install Prometheus (Debian: prometheus)"
)
def test_promtool_makes_blocks_of_a_recorded_leak(tmp_path: Path) -> None:
    file = tmp_path / "series.txt"
    trace = MEMORY / "leak-by-request.jsonl.gz"
    done = run_command("replay", str(trace), "--openmetrics", str(file), "--json")
    assert done.returncode == 0
    points = sum(map(len, parse(file).values()))

    result = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stderr) == (0, "")
    blocks = [json.loads(meta.read_text()) for meta in (tmp_path / "data").glob("*/meta.json")]
    assert sum(block["stats"]["numSamples"] for block in blocks) == points
