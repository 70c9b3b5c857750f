"""What recorded pages become: one whole page for each version of an engine, and the readings of every recording."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, generate_latest

from tests.conftest import Golden
from tests.contract.recorded import CAPTURES, FOLDER, OTHERS
from tests.samples import gpu
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.expose.metrics import HeadroomCollector
from vllm_headroom.model import EngineProcess, Gpu, Published, ReadingTime, Sample, Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.vocabulary import Role, Source

EXPECTED = Path(__file__).parent / "expected"
GIB = 2**30
WHOLE = {
    name: folder / f"{name}.prom"
    for folder, names in {
        FOLDER: (
            "vllm-0.8.5.post2-v0-single-process/load-waiting",
            "vllm-0.9.2.post2-v0/load-waiting",
            "vllm-0.10.2.post2/load-waiting",
            "vllm-0.13.0/load-waiting",
            "vllm-0.16.0/load-waiting",
            "vllm-0.20.2/kv-many-preemptions",
            "vllm-0.28.0/load-waiting",
            "vllm-0.32.0/load-waiting",
            "vllm-0.32.0/after-reset-prefix-cache",  # asleep
            "vllm-0.32.0-data-parallel-2/load-waiting",
            "vllm-0.32.0-disable-log-stats/idle",
            "vllm-0.32.0-pooling/after-60-embeddings",
            "vllm-0.33.0/load-waiting",
        ),
        OTHERS: ("sglang-0.5.23", "llama-cpp-load"),
    }.items()
    for name in names
}
"""One page for each version and each situation that has separate series."""


def beside() -> tuple[Gpu, ...]:
    """Return two GPUs, the engine's and another's, that stand beside every page."""
    ours = gpu(total=80 * GIB, used=75 * GIB, engine=74 * GIB, other=0, used_peak_bytes=76 * GIB, utilization_ratio=0.5)
    return ours, gpu(index=1, uuid="GPU-b", total=80 * GIB, used=GIB, attribution=None)


def parse_snapshot(text: str) -> Snapshot:
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
    _, snapshot = update_engine(EngineMemory(), snapshot)
    samples: list[Sample] = []
    for derivation in build_derivations(kv_bytes_per_token=512.0):
        samples += answer(derivation, derivation.initial, snapshot)[1]
    published = Published(samples=tuple(samples), monotonic_seconds=100.0)
    registry = CollectorRegistry()
    registry.register(HeadroomCollector(lambda: published, lambda: 100.5, ("0.0.0", "", "3.11.7")))
    return generate_latest(registry).decode()


@cache
def page_of(name: str) -> str:
    return rendered(parse_snapshot(WHOLE[name].read_text()))


def describe_readings(name: str) -> str:
    """Return the engines of a recording as lines: what the page gives, by the names of the fields."""
    page = CAPTURES[name].read()
    missing = " ".join(name for name, is_present in page.inputs if not is_present)
    lines = [f"{name}: {page.profile}, without {missing or 'nothing'}"]
    for engine in page.engines:
        facts = {field: value for field, value in asdict(engine).items() if value is not None}
        lines.append("    " + " ".join(f"{field}={value}" for field, value in facts.items()))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", WHOLE)
def test_a_recorded_page_makes_the_expected_page(name: str, golden: Golden) -> None:
    golden(EXPECTED / f"{name}.txt", page_of(name))


def test_every_recording_gives_the_expected_readings(golden: Golden) -> None:
    golden(EXPECTED / "readings.txt", "".join(map(describe_readings, CAPTURES)))


def test_every_expected_page_has_its_recording_and_every_recording_its_truth() -> None:
    expected = {str(path.relative_to(EXPECTED))[:-4] for path in EXPECTED.rglob("*.txt")}

    assert expected == {*WHOLE, "readings"}
    assert {str(path.relative_to(FOLDER))[:-5] for path in FOLDER.rglob("*.prom")} == set(CAPTURES)


def test_every_version_has_a_whole_page() -> None:
    def versions(names: Iterable[str]) -> set[str]:
        return {name.removeprefix("vllm-").split(".post")[0].split("-")[0].split("/")[0] for name in names}

    assert versions(CAPTURES) <= versions(WHOLE)


def test_prometheus_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: the expected pages are not linted")
    for name in WHOLE:
        page = (EXPECTED / f"{name}.txt").read_text()
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")
