"""What one daemon for all engines of a machine costs beside a sidecar, with 1, 4 and 16 engines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

from tests.bench.exporters import Exporter, find_free_port, ours, ours_on_node, runtime
from tests.bench.processes import ROOT
from tests.bench.results import Results
from tests.fakes.cgroups import remove
from tests.fakes.engine_server import LOOPBACK
from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeNvml
from tests.process import eventually

pytestmark = pytest.mark.bench

ENGINES: Final = (1, 4, 16)
GPUS: Final = 8
WARM_UP_SECONDS: Final = 15.0
SECONDS: Final = float(os.environ.get("BENCH_NODE_SECONDS", "40"))
SYSTEMD: Final = Path("/sys/fs/cgroup/systemd")
"""Where version 1 has systemd's cgroups; version 2 has them at the root of its tree."""


def test_one_daemon_for_all_engines_of_a_machine(tmp_path: Path, results: Results) -> None:
    """Each number of engines is measured with a sidecar at the same time: the ratios do not depend on the load."""
    python = runtime()
    if python is None:
        pytest.skip("the package index does not offer what runs")
    nvml = FakeNvml(tmp_path, [FakeGpu(uuid=f"GPU-{index}", used_bytes=60 * GIB) for index in range(GPUS)])
    cpu_ratios: dict[int, float] = {}
    resident_bytes: dict[int, int] = {}
    sidecar_bytes = 0
    with ExitStack() as stack:
        ports: list[int] = []
        for count in ENGINES:
            while len(ports) < count:
                ports.append(stack.enter_context(unit_engine(tmp_path)))
            with (
                ours(python, f"http://{LOOPBACK}:{ports[0]}/metrics", nvml, SAMPLE_INTERVAL_SECONDS="1") as sidecar,
                ours_on_node(python, nvml, SAMPLE_INTERVAL_SECONDS="1") as node,
            ):
                eventually(partial(is_watching, node, count), f"{count} watched", 120)
                if count_watched(node) > count:
                    pytest.skip("other engines run on this machine")
                time.sleep(WARM_UP_SECONDS)
                sidecar_seconds, node_seconds = measure_cpu_seconds(sidecar, node)
                cpu_ratios[count] = node_seconds / sidecar_seconds
                resident_bytes[count] = node.resident_bytes()
                sidecar_bytes = sidecar.resident_bytes()
            title = f"one daemon for {count} engines, 8 GPUs"
            results.note(f"CPU of {title}, by a sidecar's beside it", f"{cpu_ratios[count]:.3g} times")
            results.note(f"resident memory of {title}", f"{resident_bytes[count] / MIB:.3g} MiB")

    further = ENGINES[-1] - ENGINES[0]
    cpu_ratio = (cpu_ratios[ENGINES[-1]] - cpu_ratios[ENGINES[0]]) / further
    memory_ratio = (resident_bytes[ENGINES[-1]] - resident_bytes[ENGINES[0]]) / further / sidecar_bytes
    results.at_most(1 / 3, "CPU of each further engine, by a sidecar's", cpu_ratio, " times")
    results.at_most(0.1, "memory of each further engine, by a sidecar's", memory_ratio, " times")
    results.at_most(128, f"resident memory with {ENGINES[-1]} engines", resident_bytes[ENGINES[-1]] / MIB, " MiB")


def is_watching(node: Exporter, count: int) -> bool:
    """Return whether the daemon of a node watches so many engines at least."""
    return count_watched(node) >= count


def count_watched(node: Exporter) -> int:
    """Return how many engines the daemon watches."""
    watched = re.search(r'^headroom_engines\{kind="watched"\} (\S+)$', node.scrape(), re.MULTILINE)
    return 0 if watched is None else int(float(watched[1]))


def measure_cpu_seconds(*exporters: Exporter) -> tuple[float, ...]:
    """Return the CPU time that each takes in the same stretch, scraped each second."""
    starts_seconds = [exporter.cpu_seconds() for exporter in exporters]
    deadline_seconds = time.monotonic() + SECONDS
    while time.monotonic() < deadline_seconds:
        for exporter in exporters:
            exporter.scrape()
        time.sleep(1.0)
    return tuple(
        exporter.cpu_seconds() - start_seconds
        for exporter, start_seconds in zip(exporters, starts_seconds, strict=True)
    )


@contextmanager
def unit_engine(folder: Path) -> Iterator[int]:
    """Run an engine in a separate service, as systemd would; give its port. Skip where no cgroup can be made."""
    top = SYSTEMD if SYSTEMD.is_dir() else SYSTEMD.parent
    cgroup = top / f"headroom-bench-{uuid4()}.service"
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"this machine gives out no cgroup: {error.strerror}")
    program = folder / "vllm"
    if not program.exists():
        program.symlink_to(Path(__file__).with_name("unit_engine.py"))
    port = find_free_port()
    process = subprocess.Popen(
        [sys.executable, str(program), "serve", "model", "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        yield port
    finally:
        process.kill()
        process.wait(30)
        remove(cgroup)
