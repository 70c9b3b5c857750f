"""The simulated allocator's figures, through the probe's files and the real reader, to the detector."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest
from msgspec.structs import replace
from simulator.scenarios import SCENARIOS
from simulator.world import Course, World

from vllm_headroom.derive.inside import add_inside
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.model import Failure, Snapshot
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.vocabulary import LeakLocation, MemoryPart
from vllm_headroom_tools.history import LeakCourse as States
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.trace import parse_snapshot

HOURS: Final = 3.0


@cache
def simulated(name: str, seed: int, hours: float) -> Course:
    return World(name, seed, dataclasses.replace(SCENARIOS[name], hours=hours), probe=True).run()


def understood(sample: dict[str, Any]) -> Snapshot:
    return parse_snapshot(sample)


def states(snapshots: Iterator[Snapshot]) -> States:
    watch = LeakReplay()
    for snapshot in snapshots:
        watch.step(snapshot)
    ((_, _, course),) = watch.gpus
    return course


def write_report(folder: Path, sample: dict[str, Any]) -> None:
    """Write what a probe in the worker writes."""
    (gpu_record,) = sample["gpus"]
    device = {
        "uuid": gpu_record["uuid"],
        "total": gpu_record["total"],
        "allocated": gpu_record["allocated"],
        "reserved": gpu_record["reserved_by_torch"],
        "inactive_split": gpu_record["parts"]["fragmented"],
        "retries": 0,
        "ooms": 0,
    }
    document = {
        "headroom_probe": 1,
        "t": sample["t"],
        "interval_seconds": 5.0,
        "pid": 7,
        "started_at": 1_760_000_000.25,
        "role": "worker",
        "devices": [device],
        "parts": {"weights": 1 * 2**30, "kv_cache": 2 * 2**30},
    }
    unfinished = folder / "7-1760000000.json.tmp"
    unfinished.write_text(json.dumps(document))
    unfinished.replace(folder / "7-1760000000.json")


async def through_files(folder: Path, course: Course) -> list[Snapshot]:
    """Return each sample as the daemon sees it, with what was read from the folder in place of what the trace says."""
    reader, snapshots = ProbeReader(folder, parse=parse_probe), []
    for sample in course.samples:
        write_report(folder, sample)
        outside = understood({**sample, "gpus": [_without_inside(*sample["gpus"])], "processes": []})
        files = await reader.read(60.0)
        probe = classify_probe(files, outside.processes, outside.time_seconds)
        snapshots.append(replace(outside, gpus=add_inside(outside.gpus, probe), probe=probe))
    return snapshots


def _without_inside(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in entry.items()
        if name not in {"granted", "allocated", "reserved_by_torch", "parts"}
    }


def test_a_leak_of_tensors_is_found_through_the_probes_files(tmp_path: Path) -> None:
    course = simulated("leak_small_tensors", 0, 0.25)

    result = asyncio.run(through_files(tmp_path, course))

    last_gpus = result[-1].gpus
    assert not isinstance(last_gpus, Failure)
    assert last_gpus[0].inside is not None
    assert last_gpus[0].held_bytes == sum(part_bytes for _, part_bytes in last_gpus[0].inside.parts)
    assert {part for part, _ in last_gpus[0].inside.parts} == set(MemoryPart) - {MemoryPart.CUDA_GRAPHS}
    leak_states = states(iter(result))
    ((began, ends),) = leak_states.growing
    assert ends is None
    assert _leaked(course, began) <= 125e6
    assert leak_states.warning is not None
    assert leak_states.warning.location is LeakLocation.TENSORS


def test_the_post_mortems_leak_is_growing_at_125_megabytes() -> None:
    courses = [simulated("leak_small_tensors", seed, 0.65) for seed in range(5)]
    courses_states = [states(understood(sample) for sample in course.samples) for course in courses]
    growing = [
        _leaked(course, course_states.growing[0][0])
        for course, course_states in zip(courses, courses_states, strict=True)
    ]

    assert median(growing) <= 125e6


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("leak_small_tensors", LeakLocation.TENSORS),
        ("leak_fragments", LeakLocation.FRAGMENTATION),
        ("leak_outside_torch", LeakLocation.OUTSIDE_TORCH),
    ],
)
def test_a_leak_is_found_where_it_is(name: str, where: LeakLocation, seed: int) -> None:
    course = simulated(name, seed, HOURS)
    leak_states = states(understood(sample) for sample in course.samples)

    verdict = leak_states.first_alarm or leak_states.warning
    assert verdict is not None
    assert verdict.location is where


def _leaked(course: Course, at: float) -> float:
    truth = course.truth()
    return float(max(lost for seconds, lost in zip(truth["t"], truth["leaked_bytes"], strict=True) if seconds <= at))
