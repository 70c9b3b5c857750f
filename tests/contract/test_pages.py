"""Every recorded page and the page it makes: twelve byte for byte, the others in what differs from the first."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.conftest import Golden
from tests.contract.recorded import CAPTURES, FOLDER, HANDMADE, OTHERS
from tests.samples import gpu
from vllm_headroom.derive import answer, build_derivations
from vllm_headroom.derive.life.lives import RunState, update_run
from vllm_headroom.expose.metrics import HeadroomCollector
from vllm_headroom.model import EngineProcess, Gpu, Published, ReadingTime, Sample, Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.vocabulary import Role, Source

EXPECTED = Path(__file__).parent / "expected"
GIB = 2**30
PAGES = {
    **{name: FOLDER / f"{name}.prom" for name in CAPTURES},
    **{f"handmade/{path.stem}": path for path in sorted(HANDMADE.glob("*.prom"))},
    **{f"engines/{path.stem}": path for path in sorted(OTHERS.glob("*.prom"))},
}
FIRST = "vllm-0.32.0/load-waiting"
WHOLE = (
    FIRST,
    "vllm-0.32.0/after-reset-prefix-cache",  # asleep
    "vllm-0.32.0-data-parallel-2/load-waiting",
    "vllm-0.32.0-disable-log-stats/idle",
    "vllm-0.32.0-pooling/after-60-embeddings",
    "vllm-0.20.2/kv-many-preemptions",
    "vllm-0.13.0/load-waiting",
    "vllm-0.10.2.post2/load-waiting",
    "vllm-0.9.2.post2-v0/load-waiting",
    "vllm-0.8.5.post2-v0-single-process/load-waiting",
    "engines/sglang-0.5.23",  # bytes by a metric
    "engines/llama-cpp-load",
)
"""One for each situation and profile; beside every page stand the same GPUs, whose series need no more than these."""


def beside() -> tuple[Gpu, ...]:
    """Return two GPUs, the engine's and another's, that stand beside every page."""
    ours = gpu(total=80 * GIB, used=75 * GIB, engine=74 * GIB, other=0, used_peak_bytes=76 * GIB, utilization_ratio=0.5)
    return ours, gpu(index=1, uuid="GPU-b", total=80 * GIB, used=GIB, attribution=None)


def seen(text: str) -> Snapshot:
    return Snapshot(
        time_seconds=1_760_000_000.0,
        monotonic_seconds=100.0,
        engines=parse_engines(text),
        gpus=beside(),
        processes=(EngineProcess(pid=7, role=Role.ENGINE_CORE, rss_bytes=3 * GIB, started_at_seconds=1.0),),
        reading_times=tuple(
            ReadingTime(source=source, seconds=0.25, ended_monotonic_seconds=100.0)
            for source in (Source.ENGINE, Source.NVML, Source.PROCESS)
        ),
    )


def rendered(snapshot: Snapshot) -> str:
    """Return the page that the daemon would serve half a second after this first snapshot."""
    _, snapshot = update_run(RunState(), snapshot)
    samples: list[Sample] = []
    for derivation in build_derivations(kv_bytes_per_token=512.0):
        samples += answer(derivation, derivation.initial, snapshot)[1]
    published = Published(samples=tuple(samples), monotonic_seconds=100.0)
    registry = CollectorRegistry()
    registry.register(HeadroomCollector(lambda: published, lambda: 100.5, ("0.0.0", "", "3.11.7")))
    return generate_latest(registry).decode()


@cache
def page_of(name: str) -> str:
    return rendered(seen(PAGES[name].read_text()))


def values(page: str) -> dict[str, str]:
    """Return the value of each series, which ends its line."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {series: value for series, _, value in lines}


def differing(page: str) -> str:
    """Return the series with another value than on the first page, and after them those that are not there."""
    first, here = values(page_of(FIRST)), values(page)
    other = [f"{series} {value}\n" for series, value in here.items() if first.get(series) != value]
    return "".join([*other, *(f"not {series}\n" for series in first if series not in here)])


@pytest.mark.parametrize("name", PAGES)
def test_a_recorded_page_makes_the_expected_page(name: str, golden: Golden) -> None:
    page = page_of(name)

    golden(EXPECTED / f"{name}.txt", page if name in WHOLE else differing(page))


def test_every_expected_page_has_its_recording_and_every_recording_its_truth() -> None:
    assert {str(path.relative_to(EXPECTED))[:-4] for path in EXPECTED.rglob("*.txt")} == set(PAGES)
    assert {str(path.relative_to(FOLDER))[:-5] for path in FOLDER.rglob("*.prom")} == set(CAPTURES)


def test_every_metric_is_on_a_whole_page() -> None:
    def names(pages: Iterable[str]) -> set[str]:
        return {series.partition("{")[0] for page in pages for series in values(page_of(page))}

    assert names(PAGES) == names(WHOLE)


def test_prometheus_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: the expected pages are not linted")
    for name in WHOLE:
        page = (EXPECTED / f"{name}.txt").read_text()
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")
