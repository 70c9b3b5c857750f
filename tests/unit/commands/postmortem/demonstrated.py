"""Incidents of the demo's engine and of both simulators of leaks, to which an end is added where they have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import traces
from msgspec.structs import replace

from tests.unit.commands.postmortem.scenes import BEGAN, Record, Scene
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import EndCause
from vllm_headroom_tools.demo.world import RESERVED_BYTES, TABLE, TOTAL_BYTES, Scenario, Visits, World

STEP: Final = 15.0
LEAKY: Final = replace(TABLE["leak"], leak_bytes_per_request=150_000.0)
GREEDY: Final = Scenario(
    name="greedy",
    neighbours=Visits(pause_seconds=(600.0, 900.0), stay_seconds=(900.0, 1_200.0), size=(8.0 * GIB, 9.0 * GIB)),
)
DEMONSTRATED: Final = (
    (TABLE["crash"], EndCause.CRASH, 0.6),
    (TABLE["hang"], EndCause.HANG, 0.5),
    (LEAKY, EndCause.LEAK, 3.0),
    (GREEDY, EndCause.NEIGHBOUR, 0.6),
    (TABLE["sleep"], EndCause.NOTHING, 0.6),
    (TABLE["neighbour"], EndCause.NOTHING, 0.5),
    (TABLE["burst"], EndCause.NOTHING, 0.5),
    (TABLE["slow-start"], EndCause.NOTHING, 0.5),
)
"""What happens, its truth, and hours in which it does."""

LEAKS: Final = ("leak_req_204.8", "leak_req_51.2", "leak_req_diurnal", "leak_time_500000")
AT_EASE: Final = ("flat", "flat_flicker", "lora_loads", "graph_sizes", "mig_slice", "sample_jitter")
MECHANISMS: Final = {"leak_fast": 3, "leak_outside_torch": 12, "leak_bursts": 12, "leak_late": 12, "leak_missed": 12}
"""Of the first, hours fill its card; of each, one sample in so many."""

WELL: Final = ("ok_quiet", "ok_daily", "ok_expandable", "ok_uncounted")


def incidents() -> Iterator[Scene]:
    """Yield them all."""
    for scenario, cause, hours in DEMONSTRATED:
        for seed in range(2):
            yield Scene(cause=cause, samples=_until_an_end(scenario, seed, hours))
    for name in LEAKS:
        yield Scene(cause=EndCause.LEAK, samples=_ended(_full(traces.generated(name, 1, 3.0, STEP).samples)))
    for name, stride in MECHANISMS.items():
        yield Scene(cause=EndCause.LEAK, samples=_ended(_full(traces.simulated(name, 1).samples[::stride])))
    for name in WELL:
        yield Scene(cause=EndCause.CRASH, samples=_ended(traces.simulated(name, 1).samples[::12]))
    for name in AT_EASE:
        yield Scene(cause=EndCause.CRASH, samples=_ended(_busy(traces.generated(name, 1, 0.7, STEP).samples)))


def _until_an_end(scenario: Scenario, seed: int, hours: float) -> list[Record]:
    world, samples = World(scenario, seed), list[Record]()
    lives = world.engine.number
    for tick in range(int(hours * 3600 / STEP)):
        world.advance(tick * STEP)
        samples.append(_seen(world, tick * STEP))
        if world.engine.number > lives:
            break
    return samples


def _seen(world: World, at: float) -> Record:
    engine = traffic = world.engine
    here = world.has_processes
    gpu = {"uuid": "GPU-a", "total": TOTAL_BYTES, "used": world.used_bytes, "reserved": RESERVED_BYTES}
    gpu |= {"engine": world.engine_bytes, "other": world.neighbour_bytes}
    page = {"model_name": "m", "running": traffic.running, "waiting": traffic.waiting}
    page |= {"finished_total": traffic.finished_total, "kv_used_ratio": traffic.kv_used_ratio}
    page |= {"generation_tokens_total": traffic.generation_tokens_total, "awake": not engine.is_asleep}
    roles = ("api_server", "engine_core", "worker") if here else ()
    started = BEGAN + engine.started_seconds
    return {
        "t": BEGAN + at,
        "gpus": [gpu],
        "engines": [{**page, "started_at": started}] if world.is_serving else None,
        "processes": [{"role": role, "rss": GIB, "started_at": started} for role in roles],
    }


def _full(samples: list[Record]) -> list[Record]:
    """Make the card so small that what is in use at the end fills it."""
    total = max(gpu["used"] for sample in samples for gpu in sample["gpus"] or ()) + 40 * MIB
    for sample in samples:
        for gpu in sample["gpus"] or ():
            gpu["total"], gpu["reserved"] = total, 0
    return samples


def _busy(samples: list[Record]) -> list[Record]:
    """Let a request run in the last minute, in which the engine then ends."""
    for sample in samples[-5:]:
        for engine in sample["engines"] or ():
            engine["running"] = max(1, engine["running"])
    return samples


def _ended(samples: list[Record]) -> list[Record]:
    last_sample: dict[str, Any] = samples[-1]
    gpus = [{**gpu, "used": 0, "engine": 0, "other": 0} for gpu in samples[-1]["gpus"] or ()]
    later_samples = [
        {"t": last_sample["t"] + 5.0 * n, "gpus": gpus, "engines": None, "processes": []} for n in range(1, 4)
    ]
    return [*samples, *later_samples]
