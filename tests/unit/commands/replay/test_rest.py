"""What an engine keeps at rest: of a GPU while it sleeps, of its KV cache while it is idle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.unit.commands.replay.traces import BEGAN, MIB, STEP, sample, text
from vllm_headroom_tools.history import Curves, LeakReplay
from vllm_headroom_tools.replay.command import build_report, format_verdict
from vllm_headroom_tools.trace import parse_trace


def replay_records(records: Iterable[dict[str, Any]]) -> LeakReplay:
    watch = LeakReplay()
    for snapshot in parse_trace(text(records).encode().splitlines()):
        watch.step(snapshot)
    return watch


def at(step: int, held_mib: int, **engine_fields: Any) -> dict[str, Any]:
    """Return a sample of an engine that is awake and busy, but for what is known to be otherwise."""
    record = sample(
        BEGAN + step * STEP, held_mib * MIB, finished=float(step), running=engine_fields.pop("running", 4.0)
    )
    record["engines"][0] |= {"awake": True, "kv_used_ratio": 0.5, **engine_fields}
    return record


def nights(*kept_mib: int) -> Iterable[dict[str, Any]]:
    """Yield a day of a minute and a sleep of a minute for each."""
    for night, residue_mib in enumerate(kept_mib):
        for step in range(12):
            yield at(24 * night + step, 70_000)
        for step in range(12, 24):
            yield at(24 * night + step, residue_mib, running=0.0, awake=False, kv_used_ratio=0.0)


def test_what_each_sleep_kept_is_reported_with_the_first_and_the_last() -> None:
    watch = replay_records(nights(2_048, 2_560, 4_096))

    assert "GPU 0, asleep: kept 2 GiB in the first sleep, 4 GiB in the last of 3." in list(format_verdict(watch))
    residues_bytes = [2_048 * MIB, 2_560 * MIB, 4_096 * MIB]
    assert build_report(watch, Curves()).data["sleeps"] == [
        {"gpu": 0, "uuid": "GPU-a", "residue_bytes": residues_bytes}
    ]


def test_each_instance_of_a_gpu_keeps_its_own() -> None:
    records = [*nights(2_048)]
    for record in records:
        (gpu,) = record["gpus"]
        gpu["uuid"] = "MIG-11111111-2222"
        record["gpus"] = [gpu, {**gpu, "uuid": "MIG-33333333-4444", "engine": gpu["engine"] // 2}]

    asleep_lines = [line for line in format_verdict(replay_records(records)) if "asleep: kept" in line]

    assert asleep_lines == ["GPU 0 MIG-11111111, asleep: kept 2 GiB.", "GPU 0 MIG-33333333, asleep: kept 1 GiB."]


def test_one_sleep_is_reported_alone_and_none_is_not_reported() -> None:
    assert "GPU 0, asleep: kept 2 GiB." in list(format_verdict(replay_records(nights(2_048))))
    assert not [line for line in format_verdict(replay_records([at(0, 70_000)])) if "asleep" in line]


def test_a_nap_that_was_over_before_it_had_settled_is_no_sleep() -> None:
    nap = [at(step, 2_048, running=0.0, awake=False, kv_used_ratio=0.0) for step in (25, 26)]

    watch = replay_records([*nights(2_048), at(24, 70_000), *nap, at(27, 70_000)])

    assert [len(sleep["residue_bytes"]) for sleep in build_report(watch, Curves()).data["sleeps"]] == [1]


def test_blocks_that_no_request_holds_are_distinguished_from_a_hundredth_on() -> None:
    def idle(ratio: float) -> LeakReplay:
        return replay_records(
            [at(0, 70_000), *(at(step, 70_000, running=0.0, kv_used_ratio=ratio) for step in range(1, 30))]
        )

    lost, late = idle(0.07), idle(0.004)

    assert "m, engine 0: idle, at most 7% of its KV cache was held by no request." in list(format_verdict(lost))
    assert build_report(lost, Curves()).data["stranded"] == [{"model_name": "m", "engine": "0", "most_ratio": 0.07}]
    assert not [line for line in format_verdict(late) if "idle" in line]
