"""Play days of the daemon's time on a faster clock, with seeded random faults of its sources, disk, network and self.

Checked at every look: an answer to the scrape, a failed source that is shown as failed, a good one that is not, no
alarm without a leak. At the end: memory, descriptors, threads, state, trace and log are bounded, and no sample is lost
outside the faults of the disk and of the process itself.

    python tests/soak/soak.py --days 7 --speed 300 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from tests.e2e.hurried import RAISED_TEXT
from tests.fakes.engine_server import EngineServer, hang
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.preload import preloadable
from tests.process import Page, daemon
from tests.soak.faults import FAULTS, MIB, SHUTS_OUT, World
from vllm_headroom.trace.flight import FLIGHT_BYTES, INCIDENT_BYTES, MOST_INCIDENTS
from vllm_headroom_tools.trace import read_trace

STUCK_VOLUME: Final = Path(__file__).parents[1] / "fakes" / "stuck_volume.c"
SAMPLE_SECONDS: Final = 15
TRACE_BYTES: Final = 8 * MIB
GRACE_SECONDS: Final = 6.0
"""Of the machine's time: what a change may take until the page shows it, on a machine that others use too."""
STATE_BYTES: Final = 2 * FLIGHT_BYTES + MOST_INCIDENTS * INCIDENT_BYTES + MIB
"""Two files of the flight record, the incidents, and the detectors' small states."""

LIMITS: Final = {
    "rss_mib": 128,
    "growth_mib": 8,
    "fds": 320,
    "threads": 24,
    "state_mib": STATE_BYTES // MIB,
    "log_kib_per_hour": 512,
}
STARVED_SECONDS: Final = 0.5
"""What daemon and soak, its engine, may wait for a processor between two looks; beyond, the machine is at fault."""
LEAK_STATES: Final = ("growing", "leaking")


COSTS_SAMPLES: Final = ("disk full", "disk stuck", "stall")
"""While these are, no sample can be written."""


@dataclass
class Figures:
    """What was measured at each look, and what was wrong."""

    rss: list[int] = field(default_factory=list)
    fds: int = 0
    threads: int = 0
    state: int = 0
    scrapes: int = 0
    judged: int = 0
    slowest_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    excused: list[tuple[float, float]] = field(default_factory=list)

    def measure(self, pid: int, state: Path) -> None:
        """Add one look at the process and its folder."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        self.rss.append(int(status["VmRSS"].split()[0]) * 1024)
        self.threads = max(self.threads, int(status["Threads"]))
        self.fds = max(self.fds, len([*Path(f"/proc/{pid}/fd").iterdir()]))
        total = 0
        for path in state.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a file that replaces another
                total += path.stat().st_size if path.is_file() and "trace" not in path.name else 0
        self.state = max(self.state, total)


def measure_wait(*pids: int) -> float:
    """Return how many seconds the threads of these processes have waited for a processor so far."""
    waited = 0.0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                waited += int(path.read_text().split()[1]) / 1e9
    return waited


@dataclass
class Soak:
    """Faults that come and go, and what is checked meanwhile."""

    world: World
    figures: Figures = field(default_factory=Figures)
    active: dict[str, tuple[float, contextlib.AbstractContextManager[None]]] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    waited: float = math.inf

    def change(self) -> None:
        """End the faults whose time is over, and begin others by the dice."""
        now, dice = time.monotonic(), self.world.dice
        for name in [name for name, (until, _) in self.active.items() if until < now]:
            self.end(name)
        for name, fault in FAULTS.items():
            if name in self.active or SHUTS_OUT.get(name, set()) & self.active.keys() or dice.random() > 0.012:
                continue
            manager = fault(self.world)
            manager.__enter__()
            self.active[name] = (now + dice.uniform(2, 12), manager)
            self.changed[name] = time.monotonic()
            self.figures.counts[name] = self.figures.counts.get(name, 0) + 1

    def end(self, name: str) -> None:
        """End one fault."""
        _, manager = self.active.pop(name)
        manager.__exit__(None, None, None)
        if name in COSTS_SAMPLES:
            self.figures.excused.append((self.changed[name] - GRACE_SECONDS, time.monotonic() + GRACE_SECONDS))
        self.changed[name] = time.monotonic()

    def settled(self, *names: str) -> bool:
        """Return whether nothing of this changed lately, nor did the process itself stand still."""
        of_late = (*names, "stall", "starved")
        return all(time.monotonic() - self.changed.get(name, -math.inf) > GRACE_SECONDS for name in of_late)

    def notice_starvation(self) -> None:
        """Remember when the machine had no processor for the daemon or for this process."""
        waited = measure_wait(self.world.pid, os.getpid())
        if waited - self.waited > STARVED_SECONDS:
            self.changed["starved"] = time.monotonic()
            self.figures.counts["starved"] = self.figures.counts.get("starved", 0) + 1
        self.waited = waited

    def look(self) -> None:
        """Scrape once and judge what the page says."""
        assert self.world.running is not None
        began = time.monotonic()
        try:
            text = self.world.running.get("/metrics").text
        except httpx.HTTPError as error:
            self.notice_starvation()
            if self.settled():
                self.complain(f"no answer to a scrape: {error!r}")
            return
        self.notice_starvation()
        settled = {
            "nvml": self.settled("nvml", "reader raises"),
            "engine": self.settled("engine", "restart", "reader raises"),
        }
        self.figures.judged += settled["engine"] and settled["nvml"]
        self.figures.scrapes += 1
        self.figures.slowest_seconds = max(self.figures.slowest_seconds, time.monotonic() - began)
        self.judge(Page(text), settled)

    def judge(self, page: Page, settled: dict[str, bool]) -> None:
        """Complain of a page that does not say what is."""
        bad = {"engine": bool({"engine", "restart"} & self.active.keys()), "nvml": "nvml" in self.active}
        if "reader raises" in self.active and self.world.raising in bad:
            bad[self.world.raising] = True
        for source in ("engine", "nvml"):
            is_up = page.value("source_up", source=source) == 1
            slow = source == "nvml" and bad["nvml"] and self.is_slow()
            if settled[source] and is_up == bad[source] and not slow and not self.is_one_gpu_lost(source):
                self.complain(f"{source} is {'up' if is_up else 'down'} on the page, faults: {[*self.active]}")
        for state in LEAK_STATES:
            if page.has("leak_state", state=state) and page.value("leak_state", state=state) == 1:
                self.complain(f"an alarm without a leak: {state}")
        if "NaN" in page.text:
            self.complain("NaN on the page")

    def is_slow(self) -> bool:
        return bool(self.world.nvml.gpus[0].hangs)

    def is_one_gpu_lost(self, source: str) -> bool:
        return source == "nvml" and bool(self.world.nvml.gpus[0].errors)

    def complain(self, problem: str) -> None:
        """Remember what was wrong, and when."""
        hours = (time.monotonic() - self.began) * self.world.speed / 3600
        self.figures.wrong.append(f"{hours:.1f} h: {problem}")

    def run(self, seconds: float) -> None:
        """Play for so many seconds of the machine's time, end every fault and wait until all is well."""
        self.wait_until_well()
        self.began = time.monotonic()
        while time.monotonic() < self.began + seconds:
            self.change()
            self.look()
            self.figures.measure(self.world.pid, self.world.folder / "volume")
            self.world.nvml.forget_calls()
            time.sleep(0.25)
        for name in [*self.active]:
            self.end(name)
        self.wait_until_well()

    def wait_until_well(self) -> None:
        """Return when the page says that the engine and the driver are read."""
        assert self.world.running is not None
        self.world.running.sees(
            lambda shown_page: all(shown_page.value("source_up", source=source) == 1 for source in ("engine", "nvml")),
            "all is well",
        )


def longest_gap(trace: Path, began: float, speed: float, excused: list[tuple[float, float]]) -> tuple[int, float]:
    """Return how many samples were kept, and the machine's longest time without one outside the excused times."""
    samples = [
        snapshot.time_seconds
        for path in (f"{trace}.1", str(trace))
        if Path(path).exists()
        for snapshot in read_trace(path)
    ]
    times = [began + (sample - began) / speed for sample in samples]
    offset = time.time() - time.monotonic()
    excused = [(start + offset, end + offset) for start, end in excused]
    gaps = [
        late - early
        for early, late in pairwise(times)
        if not any(start < late and early < end for start, end in excused)
    ]
    return len(samples), max(gaps, default=math.inf)


def report(soak: Soak, *, began: float, hours: float, log: str, trace: Path, status: int) -> list[str]:
    """Print the figures; return what is not as it has to be."""
    figures, limits = soak.figures, LIMITS
    quarter = max(1, len(figures.rss) // 4)
    values = {
        "rss_mib": max(figures.rss) / MIB,
        "growth_mib": (max(figures.rss[-quarter:]) - max(figures.rss[quarter : 2 * quarter])) / MIB,
        "fds": figures.fds,
        "threads": figures.threads,
        "state_mib": figures.state / MIB,
        "log_kib_per_hour": len(log) / 1024 / hours,
    }
    trace_bytes = sum(path.stat().st_size for path in trace.parent.glob(f"{trace.name}*"))
    slowest = f"slowest {figures.slowest_seconds:.2f} s"
    scrapes = f"{figures.scrapes} scrapes ({figures.judged} judged for both sources)"
    print(f"{hours:.1f} hours of the daemon, {scrapes}, {slowest}, exit {status}")
    print(
        "faults, and how often the machine had no processor: "
        + ", ".join(f"{name} {count}" for name, count in sorted(figures.counts.items()))
    )
    print(", ".join(f"{name} {value:.1f} (at most {limits[name]})" for name, value in values.items()))
    print(f"trace {trace_bytes / MIB:.1f} MiB (at most {2 * TRACE_BYTES / MIB:.0f})")
    samples, gap = longest_gap(trace, began, soak.world.speed, figures.excused)
    print(f"{samples} samples in the trace, none for at most {gap:.2f} s of the machine's time outside such faults")
    wrong = [f"{name}: {value:.1f}" for name, value in values.items() if value > limits[name]]
    wrong += [f"the trace has {trace_bytes} bytes"] if trace_bytes > 2 * TRACE_BYTES + MIB else []
    wrong += [f"no sample for {gap:.1f} s"] if gap > GRACE_SECONDS else []
    wrong += [f"it ended with {status}"] if status else []
    # An error that a reader raised on purpose is logged with its traceback.
    wrong += ["a traceback in the log"] if log.count("Traceback") > log.count(RAISED_TEXT) else []
    return figures.wrong + wrong


def main() -> int:
    """Play, report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--days", type=float, default=7.0, help="of the daemon's time")
    parser.add_argument("--speed", type=float, default=300.0, help="how many times as fast its clock runs")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, help="a file for the daemon's log")
    args = parser.parse_args()
    print(f"seed {args.seed}: {args.days:g} days at {args.speed:g} times the speed", flush=True)
    with tempfile.TemporaryDirectory() as name, EngineServer(hang) as engine:
        folder, began = Path(name), time.time()
        volume, trace = folder / "volume", folder / "volume" / "trace.jsonl"
        for directory in (volume, folder / "probe"):
            directory.mkdir()
        nvml = FakeNvml(folder, [FakeGpu(uuid="GPU-a", used_bytes=60 * GIB)])
        world = World(folder, engine, nvml, args.speed, random.Random(args.seed))
        world.serve()
        settings = {
            "ENGINE_URL": engine.url,
            "ENGINE_TIMEOUT_SECONDS": "1",
            "SAMPLE_INTERVAL_SECONDS": str(SAMPLE_SECONDS),
            "GPU_SAMPLE_INTERVAL_SECONDS": "5",
            "PROBE_DIR": str(folder / "probe"),
            "STATE_DIR": str(volume),
            "TRACE_FILE": str(trace),
            "TRACE_MAX_BYTES": str(TRACE_BYTES),
            "SPEED": str(args.speed),
            "BEGAN": repr(began),
            "LD_PRELOAD": str(preloadable(STUCK_VOLUME, folder)),
            "STUCK": str(volume),
            "RAISING": str(folder / "raising"),
            **nvml.environment(),
        }
        with daemon(module="tests.e2e.hurried", **settings) as running:
            world.running, soak = running, Soak(world)
            soak.run(args.days * 86400 / args.speed)
            hours = (time.monotonic() - soak.began) * args.speed / 3600
            status, _ = running.stop()
            wrong = report(soak, began=began, hours=hours, log=running.log(), trace=trace, status=status)
            if args.log:
                args.log.write_text(running.log())
    print("\n".join(wrong) if wrong else "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
