"""Traces made by hand, one for each cause: what a sidecar would have recorded, half a minute apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from random import Random
from typing import Any, Final

from vllm_headroom_tools.advise.facts import Facts
from vllm_headroom_tools.advise.history import TraceHistory
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.trace import parse_trace

Record = dict[str, Any]
Records = Iterable[Record]
Trace = Callable[[], Iterator[Record]]

UNTOLD: Final = EngineArgs()
BEGAN: Final = 1_760_000_000.0
STEP: Final = 30.0
MIB: Final = 2**20
GIB: Final = 2**30
TOTAL_MIB: Final = 81_559
RESERVED_MIB: Final = 559
USABLE_MIB: Final = TOTAL_MIB - RESERVED_MIB
HEALTHY_MIB: Final = 75_000
CAPACITY: Final = 400_000
PER_SECOND: Final = 10
ROLES: Final = (("api_server", 1_000), ("engine_core", 2_400), ("worker", 5_500))


def text(records: Records) -> str:
    return "\n".join(('{"headroom_trace": 1}', *map(json.dumps, records))) + "\n"


def facts(records: Records, settings: EngineArgs = UNTOLD) -> Facts:
    return history(records).build_facts(settings)


def history(records: Records) -> TraceHistory:
    trace_history = TraceHistory()
    for snapshot in parse_trace(text(records).encode().splitlines()):
        trace_history.step(snapshot)
    return trace_history


@cache
def seen(trace: Trace) -> TraceHistory:
    """Return the history of a trace, which several tests look at."""
    return history(trace())


def sample(step: int, *, began_seconds: float = BEGAN, **engine_fields: Any) -> Record:
    """Return a sample of a healthy engine that finishes ten requests a second, but for what is known to be otherwise.

    Memory in MiB: `engine` of the engine, `other` of others.
    """
    t = BEGAN + step * STEP
    engine_mib, other_mib = engine_fields.pop("engine_mib", HEALTHY_MIB), engine_fields.pop("other_mib", 0)
    served = engine_fields.pop("served", int((t - began_seconds) * PER_SECOND))
    gpu = {
        "gpu": 0,
        "uuid": "GPU-a",
        "total": TOTAL_MIB * MIB,
        "reserved": RESERVED_MIB * MIB,
        "used": (engine_mib + other_mib + 20) * MIB,
        "engine": engine_mib * MIB,
        "other": other_mib * MIB,
        "processes": 1,
    }
    engine = {
        "model_name": "m",
        "engine": "0",
        "running": 80,
        "waiting": 0,
        "kv_used_ratio": 0.4,
        "kv_capacity_tokens": CAPACITY,
        "finished_total": served,
        "preemptions_total": 0,
        "prefix_queries_total": 1_500 * served,
        "prefix_hits_total": 600 * served,
        "awake": True,
        "started_at": began_seconds,
    }
    return {
        "t": t,
        "gpus": [gpu],
        "engines": [{**engine, **engine_fields}],
        "processes": [{"role": role, "rss": mib * MIB, "started_at": began_seconds} for role, mib in ROLES],
    }


def down(step: int, *, engine_mib: int = 0, other_mib: int = 0, began_seconds: float | None = None) -> Record:
    """Return a sample in which the engine does not answer; it has processes only where `life` is given."""
    record = sample(step, began_seconds=began_seconds or BEGAN, engine_mib=engine_mib, other_mib=other_mib)
    return {**record, "engines": None, "processes": record["processes"] if began_seconds else []}


def steps(hours: float) -> range:
    return range(int(hours * 3600 / STEP))


def healthy(hours: float = 8.0) -> Iterator[Record]:
    random = Random(1)  # noqa: S311 - a trace that is the same every time
    for step in steps(hours):
        running = random.randint(70, 90)
        yield sample(step, running=running, kv_used_ratio=running / 200)


def name_model(
    records: Records, name: str = "meta-llama/Llama-3.1-8B-Instruct", capacity_tokens: int = CAPACITY
) -> Iterator[Record]:
    """Yield the samples of an engine that serves this model with so large a KV cache."""
    for record in records:
        engines = [
            {**engine, "model_name": name, "kv_capacity_tokens": capacity_tokens} for engine in record["engines"]
        ]
        yield {**record, "engines": engines}


def healthy_with_high_water_marks() -> Iterator[Record]:
    """Memory in steps that get rarer, as the allocator takes it."""
    for step in steps(8):
        yield sample(step, engine_mib=HEALTHY_MIB + 40 * (step + 1).bit_length())


def healthy_and_full() -> Iterator[Record]:
    """A full KV cache without a preemption: requests queue, and that is all."""
    for step in steps(8):
        full = step % 40 < 10
        yield sample(
            step, running=190 if full else 80, waiting=300 if full else 0, kv_used_ratio=0.99 if full else 0.42
        )


def unused_memory() -> Iterator[Record]:
    """Half of a GPU for vLLM, its cache full, and 60 to 160 requests waiting for eight hours."""
    for step in steps(8):
        yield sample(step, engine_mib=41_000, running=30, waiting=60 + step % 100, kv_used_ratio=0.99)


def idle_cache(hours: float = 30.0) -> Iterator[Record]:
    """Two ranks that need a tenth of their cache, of which one has 8 GiB less room."""
    for step in steps(hours):
        record = sample(step, kv_used_ratio=0.1, engine_mib=60_000)
        (gpu,) = record["gpus"]
        fuller = {"gpu": 1, "uuid": "GPU-b", "used": 68_212 * MIB, "engine": 68_192 * MIB}
        yield {**record, "gpus": [gpu, {**gpu, **fuller}]}


def starts_with_a_full_shm() -> Iterator[Record]:
    """Starts that exit early, with memory left on the GPU and none in /dev/shm."""
    for record in start_up_runs_out():
        gpus = [{**gpu, "used": 1020 * MIB, "engine": 1000 * MIB} if gpu["engine"] else gpu for gpu in record["gpus"]]
        host = {"used": GIB, "limit": 64 * GIB, "shm_used": 64 * MIB, "shm_limit": 64 * MIB}
        yield {**record, "gpus": gpus, "host": host}


def healthy_beside_a_neighbour() -> Iterator[Record]:
    """A neighbour that was always there, and room for both."""
    for step in steps(8):
        yield sample(step, engine_mib=60_000, other_mib=15_000)


def healthy_after_a_restart() -> Iterator[Record]:
    began_seconds = BEGAN + 4 * 3600
    for step in steps(8):
        t = BEGAN + step * STEP
        if began_seconds - 90 <= t < began_seconds:
            yield down(step)
        else:
            yield sample(step, began_seconds=began_seconds if t >= began_seconds else BEGAN)


def restarts_on_purpose() -> Iterator[Record]:
    """Every two hours the server closes its port with requests running, its core exits, and it waits a minute."""
    for step in steps(8):
        began_seconds, run_step = BEGAN + step // 240 * 240 * STEP, step % 240
        if run_step < 234 or step >= 720:
            yield sample(step, began_seconds=began_seconds, running=5)
        else:
            record = down(step, began_seconds=began_seconds)
            yield {**record, "processes": record["processes"][: run_step < 237], "engines_failure": "unreachable"}


def gpu_leak() -> Iterator[Record]:
    """12.8 MB for each thousand requests."""
    for step in steps(3):
        grown = int(step * STEP * PER_SECOND * 12_800 / MIB) // 2 * 2
        yield sample(step, engine_mib=HEALTHY_MIB + grown)


def host_leak() -> Iterator[Record]:
    for step in steps(3):
        record = sample(step)
        # So fast that it is an alarm within two hours though the limit is unknown.
        record["processes"][1]["rss"] += int(step * STEP * PER_SECOND * 102_400)
        yield record


def host_memory_short() -> Iterator[Record]:
    """A container that has little left from the start on, most of it in /dev/shm, with files in its cache besides."""
    for step, record in enumerate(healthy()):
        host = {"used": 62 * 1024 * MIB, "limit": 64 * 1024 * MIB, "shm_used": 30 * 1024 * MIB, "oom_kills": 0}
        yield {**record, "host": {**host, "oom_kills": int(step > 900)}}


def kv_blocks_lost() -> Iterator[Record]:
    """Three idle minutes in each hour, and a little more that is still held in each."""
    for step in steps(8):
        idle = step % 120 < 6
        idle_fields = {"running": 0, "kv_used_ratio": 0.004 * (step // 120)} if idle else {}
        yield sample(step, **idle_fields)


def another_tenant() -> Iterator[Record]:
    """Somebody takes 5,300 MiB in the middle."""
    for step in steps(8):
        yield sample(step, other_mib=5_300 if 400 <= step < 700 else 0)


def left_behind() -> Iterator[Record]:
    """A run before this one left a core that holds 3 GiB, which were never this engine's to use."""
    for step in steps(8):
        record = sample(step)
        record["gpus"][0]["leftovers"] = [{"fate": "orphaned", "used": 3 * 2**30}]
        yield record


def crash_with_an_orphan() -> Iterator[Record]:
    """The engine's core is killed, and its worker, which init took over, holds the memory for two minutes."""
    began_seconds = BEGAN + 4 * 3600
    for step in steps(8):
        t = BEGAN + step * STEP
        if began_seconds - 180 <= t < began_seconds - 60:
            record = down(step, engine_mib=HEALTHY_MIB - 500)
            record["gpus"][0]["leftovers"] = [{"fate": "orphaned", "used": (HEALTHY_MIB - 500) * MIB}]
            yield record
        elif began_seconds - 60 <= t < began_seconds:
            yield down(step)
        else:
            yield sample(step, began_seconds=began_seconds if t >= began_seconds else BEGAN)


def crashes() -> Iterator[Record]:
    """The engine ends every two hours, between two samples, with room left."""
    for step in steps(8):
        yield sample(step, began_seconds=BEGAN + step // 240 * 240 * STEP)


def start_up_runs_out() -> Iterator[Record]:
    """Three starts that fill the GPU and end."""
    yield from _starts(lambda minute: [8_000, 16_000, 75_000, 80_900][minute], other_mib=0)


def start_up_beside_others() -> Iterator[Record]:
    """Three starts on a GPU of which somebody holds 30,000 MiB: vLLM refuses at once."""
    yield from _starts(lambda _: 500, other_mib=30_000)


def model_does_not_fit() -> Iterator[Record]:
    """Three starts that load the weights and end with room left."""
    yield from _starts(lambda minute: [20_000, 40_000, 70_000, 72_000][minute], other_mib=0)


def starts_without_nccl() -> Iterator[Record]:
    """Three starts that end before a weight is loaded, on an empty GPU."""
    yield from _starts(lambda _: 900, other_mib=0)


def _starts(held_mib: Callable[[int], int], *, other_mib: int) -> Iterator[Record]:
    for step in range(3 * 20):
        run_step = step % 20
        began_seconds = BEGAN + (step - run_step) * STEP
        if 2 <= run_step < 10:
            yield down(step, engine_mib=held_mib((run_step - 2) // 2), other_mib=other_mib, began_seconds=began_seconds)
        else:
            yield down(step, other_mib=other_mib)


def configuration_overshoot() -> Iterator[Record]:
    """180 MiB are left, from the start on."""
    for step in steps(8):
        yield sample(step, engine_mib=USABLE_MIB - 20 - 180)


def over_budget() -> Iterator[Record]:
    """From the first request on 3.66 GiB (4.9 %) more than 0.94 of the GPU, which leaves 567 MiB."""
    for step in steps(8):
        running = 70 + step % 20
        yield sample(step, engine_mib=80_413, running=running, gpu_memory_utilization=0.94)


def over_budget_twice_to_the_end() -> Iterator[Record]:
    """The same, and at two samples with little left the engine is gone and comes back."""
    for step in steps(8):
        began_seconds = BEGAN + step // 320 * 320 * STEP
        if step % 320 in {317, 318, 319}:
            yield down(step)
        else:
            yield sample(step, began_seconds=began_seconds, engine_mib=80_413, running=80, gpu_memory_utilization=0.94)


def growth_in_minutes() -> Iterator[Record]:
    """Half an hour at a level, then 34 MB a second until the GPU is full and the engine gone."""
    for step in steps(0.6):
        grown_mib = max(0, step - 60) * 30 * 32
        if grown_mib > USABLE_MIB - 20 - HEALTHY_MIB:
            yield down(step)
        else:
            yield sample(step, engine_mib=HEALTHY_MIB + grown_mib)


def chronic() -> Iterator[Record]:
    """High-water marks that come rarer and rarer leave 300 MiB."""
    for step in steps(8):
        yield sample(step, engine_mib=USABLE_MIB - 20 - 2_000 + min(1_700, 170 * (step + 1).bit_length()))


def burst() -> Iterator[Record]:
    """Each two hours a minute with 240 running requests, in which 120 MiB are left."""
    for step in steps(8):
        bursts = 200 <= step % 240 < 202
        yield sample(
            step,
            engine_mib=USABLE_MIB - 20 - (120 if bursts else 1_500),
            running=240 if bursts else 80,
            waiting=50 if bursts else 0,
        )


def burst_that_ends_the_engine() -> Iterator[Record]:
    """A burst with 400 MiB left at the last sample, then the engine is gone and comes back."""
    began_seconds = BEGAN + 4 * 3600
    for step in steps(8):
        t = BEGAN + step * STEP
        if began_seconds - 120 <= t < began_seconds - 90:
            yield sample(step, engine_mib=USABLE_MIB - 20 - 400, running=240)
        elif began_seconds - 90 <= t < began_seconds:
            yield down(step)
        else:
            yield sample(
                step, began_seconds=began_seconds if t >= began_seconds else BEGAN, engine_mib=USABLE_MIB - 20 - 1_500
            )


def kv_cache_blow_out() -> Iterator[Record]:
    """For half an hour requests of 20,000 tokens, where 5,000 are usual."""
    for step in steps(8):
        long = 300 <= step < 360
        yield sample(
            step,
            running=20 if long else 60,
            waiting=40 if long else 0,
            kv_used_ratio=1.0 if long else 60 * 5_000 / CAPACITY,
            preemptions_total=max(0, min(step, 360) - 300) * 200,
        )


def too_many_requests() -> Iterator[Record]:
    """For an hour 200 requests at once, of the usual 2,000 tokens."""
    for step in steps(8):
        is_crowded = 300 <= step < 420
        yield sample(
            step,
            running=(200 if step % 2 else 196) if is_crowded else 150,
            waiting=90 if is_crowded else 0,
            kv_used_ratio=0.99 if is_crowded else 0.75,
            preemptions_total=max(0, min(step, 420) - 300) * 60,
        )


THRASHING_STEP: Final = 600
"""The step at which `thrashing` begins."""


def thrashing() -> Iterator[Record]:
    """18 requests fill a cache of 1,494,220 tokens, and all of them go back to the queue: four rounds of 4 minutes."""
    for step in steps(8):
        round_number, round_step = divmod(step - THRASHING_STEP, 8)
        engine_fields: dict[str, Any] = {"running": 10, "kv_used_ratio": 0.5, "waiting": 0}
        if 0 <= round_number < 4:
            is_running = round_step < 5
            engine_fields = {
                "running": 18 if is_running else 0,
                "waiting": 0 if is_running else 18,
                "kv_used_ratio": 0.6 + round_step / 10 if is_running else 0.0,
            }
        collapses = max(0, min(4, (step - THRASHING_STEP + 3) // 8))
        # Nothing finishes while it thrashes.
        working_steps = min(step, THRASHING_STEP) + max(0, step - THRASHING_STEP - 32)
        yield sample(
            step,
            kv_capacity_tokens=1_494_220,
            preemptions_total=18 * collapses,
            served=working_steps * 300,
            **engine_fields,
        )


def too_small_a_cache() -> Iterator[Record]:
    """A cache of 6,000 tokens for requests of 2,000."""
    for step in steps(8):
        yield sample(
            step,
            running=3 if step % 3 else 2,
            waiting=5,
            kv_capacity_tokens=6_000,
            kv_used_ratio=1.0 if step % 3 else 0.67,
            served=step * 10,
            preemptions_total=step * 5,
        )


def too_few_requests() -> Iterator[Record]:
    """32 run and no more, though the cache is a fifth full."""
    for step in steps(8):
        yield sample(step, running=32, waiting=60, kv_used_ratio=0.2)


def prefix_cache() -> Iterator[Record]:
    """12 % of the tokens hit."""
    for step in steps(24):
        served = int(step * STEP * PER_SECOND)
        yield sample(step, prefix_hits_total=180 * served)
