"""What is no leak of the engine: what configured pools may fill, and growth of a card whose holders are unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, values
from tests.unit.derive.leak.stretches import BASE, TOTAL, leak
from tests.unit.derive.leak.test_derivation import run, states
from vllm_headroom import catalog
from vllm_headroom.derive.verdicts import judge_snapshot
from vllm_headroom.model import EngineProcess, Failure, Gpu, HostMemory, Pool, Sample, Snapshot, Values, Verdict
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import HostPart, Level, Role, Situation

FILLED: float = leak(2 * 3600)
Change = Callable[[Snapshot, float], Snapshot]


def with_pool(size_bytes: float, role: Role | None = Role.WORKER) -> Change:
    pool = Pool(part=HostPart.KV_OFFLOAD, role=role, size_bytes=int(size_bytes))

    def change(snapshot: Snapshot, _seconds: float) -> Snapshot:
        (process,) = () if isinstance(snapshot.processes, Failure) else snapshot.processes
        return replace(snapshot, pools=(pool,), host=HostMemory(used_bytes=process.rss_bytes, limit_bytes=TOTAL))

    return change


def judge_worker(size_bytes: float) -> Verdict:
    """Return the verdict on host memory after two hours in which a worker with a pool of this size grew."""
    change = with_pool(size_bytes)
    *_, last_samples = run(2, leak, change)
    worker = EngineProcess(pid=7, role=Role.WORKER, rss_bytes=BASE, started_at_seconds=1.0)
    last_snapshot = replace(change(seen_last(), 0.0), processes=(worker,))
    (verdict,) = (
        verdict for verdict in judge_snapshot(last_snapshot, Values(last_samples)) if verdict.subject == "host memory"
    )
    return verdict


@pytest.mark.parametrize(("share", "state"), [(1.0, "growing"), (0.7, "leaking")], ids=["within", "beyond"])
def test_growth_is_no_alarm_before_it_exceeds_what_the_configured_pools_may_fill(share: float, state: str) -> None:
    *_, last_samples = run(2, leak, with_pool(share * FILLED))

    assert states(last_samples, catalog.HOST_LEAK_STATE) == {state}
    assert states(last_samples) == {"leaking"}, "a pool in host memory says nothing of the GPU"
    bound_bytes = values(last_samples, catalog.LEAK_BOUND)[("", "", "worker")]
    assert bound_bytes == pytest.approx(max(0.0, share * FILLED - FILLED), abs=50 * MIB)


def test_a_pool_on_the_gpu_bounds_it_and_none_known_is_absent() -> None:
    *_, last_samples = run(2, leak, with_pool(2 * FILLED, None))
    *_, without = run(0.1, leak)

    assert states(last_samples) == {"growing"}
    assert values(last_samples, catalog.LEAK_BOUND)[(*A_GPU, "")] == pytest.approx(FILLED, abs=50 * MIB)
    assert not values(without, catalog.LEAK_BOUND)


def test_the_sentence_says_how_much_of_the_pools_is_filled() -> None:
    verdict = judge_worker(2 * FILLED)

    assert verdict.situation is Situation.FILLING
    assert verdict.level is Level.GOOD
    assert verdict.sentence.startswith("Host memory of worker grows as its configured pools do: filling, ")


def test_beyond_the_pools_the_sentence_says_that_offloads_can_take_more() -> None:
    verdict = judge_worker(0.7 * FILLED)

    assert verdict.level is Level.ALARM
    assert verdict.sentence.endswith(" are full: offloads can take 1.92 times that.")


def unknown_holders(snapshot: Snapshot, _seconds: float) -> Snapshot:
    return replace(snapshot, gpus=tuple(unattribute(gpu, None) for gpu in snapshot.devices))


def only_process(snapshot: Snapshot, _seconds: float) -> Snapshot:
    return replace(snapshot, gpus=tuple(unattribute(gpu, 1) for gpu in snapshot.devices))


def with_a_job(snapshot: Snapshot, seconds: float) -> Snapshot:
    """Let another process be on the card for six minutes of every forty."""
    count = 2 if seconds % 2400 >= 2040 else 1
    return replace(snapshot, gpus=tuple(unattribute(gpu, count) for gpu in snapshot.devices))


def test_an_alarm_is_held_while_another_process_comes_and_goes() -> None:
    states_over_time = [states(samples) for samples in run(3, leak, with_a_job)]

    assert {"leaking"} in states_over_time
    assert all(state == {"leaking"} for state in states_over_time[states_over_time.index({"leaking"}) :])


def unattribute(gpu: Gpu, count: int | None) -> Gpu:
    return replace(gpu, engine_bytes=None, other_bytes=None, process_count=count)


def seen_last() -> Snapshot:
    snapshots: list[Snapshot] = []

    def keep(snapshot: Snapshot, _seconds: float) -> Snapshot:
        snapshots.append(snapshot)
        return snapshot

    list(run(0.01, leak, keep))
    return snapshots[-1]


def test_a_card_whose_holders_are_unknown_fills_as_surely_and_the_sentence_blames_nobody() -> None:
    samples_over_time = list(run(3, leak, unknown_holders))
    last_snapshot = unknown_holders(seen_last(), 0.0)

    (verdict,) = (
        verdict
        for verdict in judge_snapshot(last_snapshot, Values(samples_over_time[-1]))
        if verdict.subject == "GPU 0"
    )

    assert states(samples_over_time[-1]) == {"leaking"}
    assert (verdict.level, verdict.alert) == (Level.ALARM, "HeadroomGpuMemoryLeak")
    assert verdict.sentence.startswith(
        "GPU 0 fills by 440 MiB an hour (by whom is not known; every process on it is affected): out of memory in "
    )


def test_what_fills_such_a_card_by_no_known_rate_is_a_sentence_too() -> None:
    *_, last_samples = run(3, leak, unknown_holders)
    states_alone = tuple(sample for sample in last_samples if sample.metric is catalog.LEAK_STATE)

    (verdict,) = (
        verdict
        for verdict in judge_snapshot(unknown_holders(seen_last(), 0.0), Values(states_alone))
        if verdict.subject == "GPU 0"
    )

    assert verdict.sentence == "GPU 0 fills (by whom is not known; every process on it is affected)."


def test_growth_that_the_probe_sees_inside_the_engine_is_the_engines_on_any_card() -> None:
    last_samples = [
        *list(run(3, leak, unknown_holders))[-1],
        Sample(catalog.LEAK_LOCATION, ("0", "GPU-a", "tensors"), 1.0),
    ]

    (verdict,) = (
        verdict
        for verdict in judge_snapshot(unknown_holders(seen_last(), 0.0), Values(last_samples))
        if verdict.subject == "GPU 0"
    )

    assert verdict.sentence.startswith("GPU 0 leaks")


def test_the_only_process_on_a_card_is_the_engine() -> None:
    *_, last_samples = run(3, leak, only_process)

    assert states(last_samples) == {"leaking"}
