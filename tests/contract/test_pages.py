"""Every recorded page and the page it makes, byte for byte."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.conftest import Golden
from tests.contract.recorded import CAPTURES, FOLDER, HANDMADE
from tests.samples import gpu
from vllm_headroom.derive import derivations
from vllm_headroom.derive.derivation import answer
from vllm_headroom.derive.life.follow import LifeState, lived
from vllm_headroom.expose.collector import HeadroomCollector
from vllm_headroom.model import EngineProcess, Gpu, Published, ReadingTime, Sample, Snapshot
from vllm_headroom.parse import parse_engines
from vllm_headroom.vocabulary import Role, Source

EXPECTED = Path(__file__).parent / "expected"
GIB = 2**30
PAGES = {
    **{name: FOLDER / f"{name}.prom" for name in CAPTURES},
    **{f"handmade/{path.stem}": path for path in sorted(HANDMADE.glob("*.prom"))},
}


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
            ReadingTime(source=source, seconds=0.25, ended_monotonic_seconds=100.0) for source in Source
        ),
    )


def rendered(snapshot: Snapshot) -> str:
    """Return the page that the daemon would serve half a second after this first snapshot."""
    _, snapshot = lived(LifeState(), snapshot)
    samples: list[Sample] = []
    for derivation in derivations(kv_bytes_per_token=512.0):
        samples += answer(derivation, derivation.initial, snapshot)[1]
    published = Published(samples=tuple(samples), monotonic_seconds=100.0)
    registry = CollectorRegistry()
    registry.register(HeadroomCollector(lambda: published, lambda: 100.5, ("0.0.0", "", "3.11.7")))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("name", PAGES)
def test_a_recorded_page_makes_the_expected_page(name: str, golden: Golden) -> None:
    golden(EXPECTED / f"{name}.txt", rendered(seen(PAGES[name].read_text())))


def test_every_expected_page_has_its_recording_and_every_recording_its_truth() -> None:
    assert {str(path.relative_to(EXPECTED))[:-4] for path in EXPECTED.rglob("*.txt")} == set(PAGES)
    assert {str(path.relative_to(FOLDER))[:-5] for path in FOLDER.rglob("*.prom")} == set(CAPTURES)


def test_prometheus_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: the expected pages are not linted")
    pages = {path.read_text() for path in EXPECTED.rglob("*.txt")}

    assert pages
    for page in pages:
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")
