"""One trace for each cause: what is found, and what is advised of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice

import pytest

from tests.unit.commands.advise import traces
from vllm_headroom_tools.advise.finding import Advice, Cause, Change
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import Assessment, judge_facts
from vllm_headroom_tools.conclusion import Conclusion

AS_SET = EngineArgs(gpu_memory_utilization=0.92)


def answer(trace: traces.Trace, settings: EngineArgs = AS_SET) -> Assessment:
    return judge_facts(traces.seen(trace).build_facts(settings))


def only(trace: traces.Trace, settings: EngineArgs = AS_SET) -> Advice:
    (advice,) = answer(trace, settings).advice
    return advice


def flags(advice: Advice) -> list[tuple[Flag, float | None]]:
    return [(change.flag, change.value) for change in advice.changes if change.flag is not None]


def evidence(advice: Advice) -> dict[str, float | str]:
    return {figure.name: figure.value for figure in advice.evidence}


HEALTHY: tuple[traces.Trace, ...] = (
    traces.healthy,
    traces.healthy_with_high_water_marks,
    traces.healthy_and_full,
    traces.healthy_beside_a_neighbour,
    traces.healthy_after_a_restart,
    traces.restarts_on_purpose,
)

CAUSES: tuple[tuple[traces.Trace, Cause], ...] = (
    (traces.gpu_leak, Cause.GPU_LEAK),
    (traces.host_leak, Cause.HOST_LEAK),
    (traces.crash_with_an_orphan, Cause.CRASH),
    (traces.crashes, Cause.CRASH),
    (traces.left_behind, Cause.LEFT_BEHIND),
    (traces.another_tenant, Cause.ANOTHER_TENANT),
    (traces.start_up_runs_out, Cause.START_UP),
    (traces.start_up_beside_others, Cause.START_UP),
    (traces.model_does_not_fit, Cause.MODEL_DOES_NOT_FIT),
    (traces.starts_without_nccl, Cause.START_UP),
    (traces.configuration_overshoot, Cause.CONFIGURATION_OVERSHOOT),
    (traces.over_budget, Cause.OVER_BUDGET),
    (traces.over_budget_twice_to_the_end, Cause.OVER_BUDGET),
    (traces.chronic, Cause.CHRONIC),
    (traces.burst, Cause.BURST),
    (traces.burst_that_ends_the_engine, Cause.BURST),
    (traces.kv_cache_blow_out, Cause.KV_CACHE_BLOW_OUT),
    (traces.thrashing, Cause.KV_CACHE_THRASHING),
    (traces.too_many_requests, Cause.CONCURRENCY_MISJUDGED),
    (traces.too_small_a_cache, Cause.MODEL_DOES_NOT_FIT),
    (traces.too_few_requests, Cause.CONCURRENCY_MISJUDGED),
    (traces.unused_memory, Cause.UNUSED_MEMORY),
    (traces.starts_with_a_full_shm, Cause.START_UP),
    (traces.prefix_cache, Cause.PREFIX_CACHE),
    (traces.kv_blocks_lost, Cause.KV_BLOCK_LEAK),
    (traces.host_memory_short, Cause.HOST_MEMORY),
)


@pytest.mark.parametrize("trace", HEALTHY)
@pytest.mark.parametrize("settings", [AS_SET, EngineArgs()])
def test_a_healthy_engine_is_advised_nothing(trace: traces.Trace, settings: EngineArgs) -> None:
    reply = answer(trace, settings)

    assert (reply.verdict, reply.advice, reply.missing) == (Conclusion.GOOD, (), ())


@pytest.mark.parametrize(("trace", "cause"), CAUSES)
@pytest.mark.parametrize("settings", [AS_SET, EngineArgs()])
def test_each_cause_is_found_and_no_other(trace: traces.Trace, cause: Cause, settings: EngineArgs) -> None:
    reply = answer(trace, settings)

    assert reply.verdict is Conclusion.NOT_GOOD
    assert [advice.cause for advice in reply.advice] == [cause]
    assert reply.advice[0].changes
    assert reply.advice[0].evidence


def test_every_cause_has_a_trace() -> None:
    # A trace has no peaks of steps: only a page shows them (test_peaks.py).
    assert {cause for _, cause in CAUSES} == set(Cause) - {Cause.PEAK}


def test_a_leak_is_mended_by_a_restart_and_an_upgrade_and_by_no_option() -> None:
    for trace in (traces.gpu_leak, traces.host_leak):
        advice = only(trace)

        assert flags(advice) == []
        assert advice.changes[0].text.startswith("Restart the engine")
        assert advice.changes[1].text.startswith("Upgrade vLLM")


@pytest.mark.parametrize(
    ("place", "cure"),
    [
        ("tensors", "the growth is tensors that nobody frees: report it to vLLM"),
        ("fragmentation", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("outside_torch", "release notes of NCCL and of the driver"),
    ],
)
def test_where_a_leak_is_tells_what_mends_it(place: str, cure: str) -> None:
    def probed() -> Iterator[traces.Record]:
        first_engine_bytes = None
        for record in traces.gpu_leak():
            (entry,) = record["gpus"]
            first_engine_bytes = entry["engine"] if first_engine_bytes is None else first_engine_bytes
            grown = entry["engine"] - first_engine_bytes
            inside = first_engine_bytes - 2_000 * traces.MIB
            entry["allocated"] = inside - 1_000 * traces.MIB + grown * (place == "tensors")
            entry["reserved_by_torch"] = inside + grown * (place != "outside_torch")
            yield record

    advice = only(probed)

    assert evidence(advice)["location"] == place
    assert cure in "".join(change.text for change in advice.changes)
    assert flags(advice) == []


def test_blocks_that_are_lost_are_reported_with_how_often_more_were() -> None:
    advice = only(traces.kv_blocks_lost)

    assert evidence(advice) == {"stranded_ratio": pytest.approx(0.028), "rises": 7}
    assert flags(advice) == []


def test_blocks_that_come_back_or_stay_the_same_are_not_lost() -> None:
    def given_back() -> Iterator[traces.Record]:
        for step in traces.steps(8):
            held_ratio = 0.004 * (step // 120 % 3)
            yield traces.sample(step, **({"running": 0, "kv_used_ratio": held_ratio} if step % 120 < 6 else {}))

    def once() -> Iterator[traces.Record]:
        for step in traces.steps(8):
            yield traces.sample(step, **({"running": 0, "kv_used_ratio": 0.04} if step % 120 < 6 else {}))

    assert answer(given_back).advice == answer(once).advice == ()


def test_host_memory_that_is_short_names_the_option_that_there_is() -> None:
    advice = only(traces.host_memory_short, EngineArgs(version=(0, 32, 0)))

    assert flags(advice) == [(Flag.MM_PROCESSOR_CACHE_GB, 1.0)]
    assert evidence(advice)["oom_kills"] == 1
    assert flags(only(traces.host_memory_short, EngineArgs(version=(0, 10, 0)))) == []


def test_a_container_with_room_is_advised_nothing() -> None:
    def roomy() -> Iterator[traces.Record]:
        for record in traces.healthy():
            yield {**record, "host": {"used": 60 * 1024 * traces.MIB, "limit": 64 * 1024 * traces.MIB, "oom_kills": 0}}

    assert answer(roomy).advice == ()


def test_a_leak_is_reported_with_its_rate_and_the_least_time_that_is_left() -> None:
    advice = only(traces.gpu_leak)

    assert evidence(advice)["bytes_per_request"] == pytest.approx(12_800, rel=0.1)
    assert evidence(advice)["bytes_per_second"] == pytest.approx(128_000, rel=0.1)
    assert "within 4 h 58 min" in advice.changes[0].text
    assert 10 * 3600 < float(evidence(advice)["time_to_oom_seconds"]) < 12 * 3600
    assert "out of memory in 4 h 58 min at the earliest" in [figure.text for figure in advice.evidence]


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ((0, 20, 0), "Upgrade to vLLM 0.26 or newer"),
        ((0, 26, 0), "Upgrade vLLM"),
        ((0, 17, 1), "Upgrade vLLM"),
        (None, "Upgrade vLLM"),
    ],
)
def test_a_host_leak_that_is_known_names_the_version_that_mends_it(
    version: tuple[int, int, int] | None, text: str
) -> None:
    advice = only(traces.host_leak, EngineArgs(version=version))

    assert advice.changes[-1].text.startswith(text)


def test_a_leak_that_a_restart_ended_is_still_reported_and_asks_for_no_other_restart() -> None:
    began_seconds = traces.BEGAN + 3 * 3600

    def restarted() -> Iterator[traces.Record]:
        return chain(traces.gpu_leak(), (traces.sample(step, began_seconds=began_seconds) for step in range(360, 500)))

    advice = only(restarted)

    assert "; it ended at 2025-10-09 11:53:20Z" in advice.summary
    assert [change.text.split()[0] for change in advice.changes] == ["Upgrade"]


def test_a_burst_in_a_leaking_engine_is_the_leak() -> None:
    def both() -> Iterator[traces.Record]:
        for step, record in enumerate(traces.gpu_leak()):
            (gpu,) = record["gpus"]
            if step == 350:
                gpu["used"] = gpu["engine"] = (traces.USABLE_MIB - 100) * traces.MIB
            yield record

    reply = answer(both)

    assert [advice.cause for advice in reply.advice] == [Cause.GPU_LEAK]
    assert any(note.startswith("No option is advised while the engine leaks") for note in reply.notes)


def test_beside_a_leak_another_tenant_is_reported_without_an_option() -> None:
    def both() -> Iterator[traces.Record]:
        for step, record in enumerate(traces.gpu_leak()):
            (gpu,) = record["gpus"]
            neighbour_bytes = 4_500 * traces.MIB if step > 300 else 0
            yield {**record, "gpus": [{**gpu, "other": neighbour_bytes, "used": gpu["used"] + neighbour_bytes}]}

    reply = answer(both)

    assert [advice.cause for advice in reply.advice] == [Cause.GPU_LEAK, Cause.ANOTHER_TENANT]
    assert [flags(advice) for advice in reply.advice] == [[], []]


def test_what_a_crashed_engine_left_behind_is_no_tenant() -> None:
    advice = only(traces.crash_with_an_orphan)

    assert evidence(advice)["orphan_bytes"] == (traces.HEALTHY_MIB - 500) * traces.MIB
    assert flags(advice) == []


def test_ends_that_may_be_restarts_are_not_called_crashes() -> None:
    may_be, is_one = only(traces.crashes), only(traces.crash_with_an_orphan)

    assert may_be.summary == (
        "The engine exited at work, by a crash or on purpose, and no figure shows that GPU memory ran out."
    )
    assert is_one.summary == "The engine crashed, and no figure shows that GPU memory ran out."


def test_one_end_while_requests_ran_is_reported_and_called_nothing() -> None:
    (note,) = [note for note in answer(traces.healthy_after_a_restart).notes if "exited at" in note]

    assert re.search(r"while requests ran, with \S+ GiB left: a planned restart, a crash, or an allocation", note)


def test_ends_of_an_engine_whose_gpus_nobody_read_are_not_said_to_have_had_memory_left() -> None:
    reply = answer(lambda: ({**record, "gpus": None} for record in traces.crashes()))
    (note,) = [note for note in reply.notes if "exited at" in note]

    assert "while requests ran: a planned restart, a crash, or an allocation that failed" in note
    assert reply.advice == ()


def test_another_tenant_moves_first_and_else_vllm_takes_so_much_less_that_both_have_room() -> None:
    advice = only(traces.another_tenant)

    assert evidence(advice)["most_others_bytes"] == 5_320 * traces.MIB
    assert advice.changes[0].flag is None
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.91)]


def test_a_tenant_that_leaves_little_is_not_the_engines_overshoot() -> None:
    def tight() -> Iterator[traces.Record]:
        return (traces.sample(step, other_mib=5_700 if step >= 400 else 0) for step in traces.steps(8))

    assert only(tight).cause is Cause.ANOTHER_TENANT


def test_an_engine_over_its_budget_is_advised_the_share_that_gives_the_excess_back() -> None:
    advice = only(traces.over_budget_twice_to_the_end, EngineArgs())

    assert advice.summary == "The engine holds more of GPU 0 than its budget, from the start."
    assert evidence(advice)["excess_bytes"] == pytest.approx(3_748 * traces.MIB, abs=traces.MIB)
    assert evidence(advice)["over_budget_exits"] == 3
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.89)]


def test_growth_that_fills_the_gpu_in_minutes_is_a_leak_without_an_option() -> None:
    (advice,) = answer(traces.growth_in_minutes).advice

    assert (advice.cause, flags(advice)) == (Cause.GPU_LEAK, [])
    assert evidence(advice)["bytes_per_second"] == 32 * traces.MIB


def test_180_mib_left_is_092_to_090() -> None:
    advice = only(traces.configuration_overshoot)

    assert evidence(advice)["least_room_bytes"] == 180 * traces.MIB
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.9)]


def test_where_what_is_set_is_not_known_the_difference_is_reported() -> None:
    (change,) = only(traces.configuration_overshoot, EngineArgs()).changes

    assert (change.flag, change.value, change.difference) == (Flag.GPU_MEMORY_UTILIZATION, None, -0.02)


def test_a_cache_that_is_sized_in_bytes_is_made_smaller_in_bytes() -> None:
    sized = EngineArgs(sizes_cache_in_bytes=True, kv_cache_memory_bytes=50 * 2**30, gpu_memory_utilization=0.92)

    (change,) = only(traces.configuration_overshoot, sized).changes

    assert (change.flag, change.value) == (Flag.KV_CACHE_MEMORY_BYTES, 50 * 2**30 - 844 * traces.MIB)


def test_a_slow_rise_is_chronic_and_needs_room_for_its_high_water_marks() -> None:
    advice = only(traces.chronic)

    assert evidence(advice)["leak_state"] == "stable"
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.91)]


def test_a_burst_is_bounded_before_vllm_takes_less() -> None:
    engine_args = EngineArgs(gpu_memory_utilization=0.92, max_num_batched_tokens=8192, max_num_seqs=256)

    advice = only(traces.burst, engine_args)

    assert evidence(advice)["times"] == 4
    assert flags(advice) == [
        (Flag.MAX_NUM_BATCHED_TOKENS, 4096),
        (Flag.MAX_NUM_SEQS, 80),
        (Flag.GPU_MEMORY_UTILIZATION, 0.9),
    ]


def test_an_engine_that_ends_in_a_burst_is_reported_as_such() -> None:
    assert evidence(only(traces.burst_that_ends_the_engine))["engine_ended"] == 1


def test_requests_that_are_longer_than_usual_are_bounded_above_what_is_usual() -> None:
    advice = only(traces.kv_cache_blow_out)

    assert evidence(advice)["tokens_per_request"] == 20_000
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.95), (Flag.MAX_MODEL_LEN, 7168)]


def test_6300_tokens_are_8192() -> None:
    def longer() -> Iterator[traces.Record]:
        for record in traces.kv_cache_blow_out():
            (engine,) = record["engines"]
            calm = engine["kv_used_ratio"] < 1
            yield {**record, "engines": [engine | ({"kv_used_ratio": 60 * 6_300 / 400_000} if calm else {})]}

    assert (Flag.MAX_MODEL_LEN, 8192) in flags(only(longer))


def test_a_limit_on_length_that_is_set_lower_already_is_not_reported_again() -> None:
    advice = only(traces.kv_cache_blow_out, EngineArgs(max_model_len=4096))

    assert Flag.MAX_MODEL_LEN not in dict(flags(advice))


def test_as_many_requests_are_advised_as_nine_tenths_of_the_cache_hold() -> None:
    advice = only(traces.too_many_requests)

    assert evidence(advice)["preemptions"] == 7_200
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.95), (Flag.MAX_NUM_SEQS, 181)]
    assert advice.changes[1].text == "as many as 90 % of its 400,000 tokens hold, at 1,980 for each"


def test_a_load_that_never_exceeded_110_is_no_limit_where_225_fit() -> None:
    """110 requests ran until 251 came, and nothing between was tried: 0.9 x 500,000 / 2,000 is 225."""

    def jump() -> Iterator[traces.Record]:
        for step in traces.steps(8):
            is_crowded = 300 <= step < 420
            yield traces.sample(
                step,
                running=250 if is_crowded else 110,
                waiting=90 if is_crowded else 0,
                kv_used_ratio=1.0 if is_crowded else 0.44,
                kv_capacity_tokens=500_000,
                preemptions_total=max(0, min(step, 420) - 300) * 60,
            )

    advice = only(jump)

    assert dict(flags(advice))[Flag.MAX_NUM_SEQS] == 225
    assert evidence(advice)["calm_running"] == 110


def test_thrashing_is_recognised_at_its_second_round() -> None:
    records = list(islice(traces.thrashing(), traces.THRASHING_STEP + 17))

    assessment = judge_facts(traces.facts(records))
    (advice,) = assessment.advice

    assert advice.cause is Cause.KV_CACHE_THRASHING
    assert (evidence(advice)["times"], evidence(advice)["preemptions"]) == (2, 36)
    assert dict(flags(advice)) == {Flag.MAX_NUM_SEQS: 16}


def test_thrashing_of_a_short_trace_needs_no_hour() -> None:
    """As in the field (discuss.vllm.ai, 2608): 18 requests of 80,800 tokens, four times back to the queue."""
    records = list(islice(traces.thrashing(), traces.THRASHING_STEP - 30, traces.THRASHING_STEP + 60))

    assessment = judge_facts(traces.facts(records))

    assert assessment.verdict is Conclusion.NOT_GOOD
    assert [advice.cause for advice in assessment.advice] == [Cause.KV_CACHE_THRASHING]
    assert assessment.advice[0].summary == (
        "The KV cache of m thrashes: 4 times in 12 min 0 s it was full and running requests went back to the queue."
    )
    assert evidence(assessment.advice[0])["times"] == 4


@pytest.mark.parametrize("counts", [True, False])
def test_thrashing_shows_without_the_counter_of_preemptions(counts: bool) -> None:  # noqa: FBT001 - a case
    def uncounted() -> Iterator[traces.Record]:
        for record in traces.thrashing():
            (engine,) = record["engines"]
            preemptions = engine["preemptions_total"] if counts else None
            yield {**record, "engines": [{**engine, "preemptions_total": preemptions}]}

    assert [advice.cause for advice in judge_facts(traces.facts(uncounted())).advice] == [Cause.KV_CACHE_THRASHING]


def test_batches_that_finish_with_a_full_cache_do_not_thrash() -> None:
    """A hundred requests finish at once while the next hundred wait, every four minutes."""

    def batches() -> Iterator[traces.Record]:
        for step in traces.steps(2):
            batch, batch_step = divmod(step, 8)
            has_finished = batch_step >= 6
            yield traces.sample(
                step,
                served=100 * (batch + has_finished),
                running=0 if has_finished else 100,
                waiting=100 if has_finished else 0,
                kv_used_ratio=0.0 if has_finished else 0.8 + batch_step / 30,
            )

    assert judge_facts(traces.facts(batches())).advice == ()


def test_a_burst_that_collapses_twice_within_half_a_minute_is_no_thrashing() -> None:
    def burst() -> Iterator[traces.Record]:
        for step in traces.steps(2):
            engine_fields = {"running": 80, "kv_used_ratio": 0.4}
            if 100 <= step < 102:
                engine_fields = {"running": 200, "kv_used_ratio": 1.0}
            yield traces.sample(step, preemptions_total=min(2, max(0, step - 100)) * 150, **engine_fields)

    assert judge_facts(traces.facts(burst())).advice == ()


def test_one_collapse_or_a_restart_is_no_thrashing() -> None:
    once = list(islice(traces.thrashing(), traces.THRASHING_STEP + 9))
    assert judge_facts(traces.facts(once)).advice == ()

    def restarts() -> Iterator[traces.Record]:
        for record in traces.thrashing():
            (engine,) = record["engines"]
            run = engine["preemptions_total"]
            yield {**record, "engines": [{**engine, "preemptions_total": 0, "started_at": traces.BEGAN + run}]}

    assert Cause.KV_CACHE_THRASHING not in {advice.cause for advice in judge_facts(traces.facts(restarts())).advice}


def test_a_full_cache_never_makes_vllm_take_less() -> None:
    for trace in (traces.kv_cache_blow_out, traces.too_many_requests, traces.too_small_a_cache):
        for settings in (AS_SET, EngineArgs()):
            changes = [change for change in only(trace, settings).changes if _takes(change)]

            assert all(change.value == 0.95 or (change.difference or 0) > 0 for change in changes)
            assert changes


def _takes(change: Change) -> bool:
    return change.flag is Flag.GPU_MEMORY_UTILIZATION


def test_vllm_takes_no_more_where_little_was_left_at_a_peak() -> None:
    def tight() -> Iterator[traces.Record]:
        for record in traces.too_many_requests():
            (gpu,) = record["gpus"]
            full = (traces.USABLE_MIB - 900) * traces.MIB
            yield {**record, "gpus": [{**gpu, "used": full, "engine": full}]}

    assert dict(flags(only(tight))) == {Flag.MAX_NUM_SEQS: 181}


def test_a_cache_of_three_requests_is_a_model_that_does_not_fit() -> None:
    advice = only(traces.too_small_a_cache)

    assert dict(flags(advice)) == {Flag.GPU_MEMORY_UTILIZATION: 0.95, Flag.TENSOR_PARALLEL_SIZE: 2}


def test_requests_that_wait_beside_an_empty_cache_may_be_more_at_once() -> None:
    advice = only(traces.too_few_requests)

    assert flags(advice) == [(Flag.MAX_NUM_SEQS, 128)]
    assert advice.changes[0].text == "would fill 80 % of the KV cache of 400,000 tokens, at 2,500 for each request"
    assert advice.changes[0].cost.startswith("4 times as many share the GPU")
    assert answer(traces.too_few_requests, EngineArgs(max_num_seqs=128)).advice == ()


def test_memory_that_is_never_used_enlarges_the_cache_that_requests_wait_for() -> None:
    """As in the field: 39 GiB idle at a share of 0.5, for eight hours."""
    advice = only(traces.unused_memory, EngineArgs(gpu_memory_utilization=0.5))

    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.95)]
    assert evidence(advice)["queued_seconds"] == pytest.approx(8 * 3600, abs=60)
    assert evidence(advice)["least_room_bytes"] == (traces.USABLE_MIB - 41_020) * traces.MIB
    assert advice.evidence[0].text.startswith("107 requests waited with a full cache, for 7 h 59 min")


def test_ranks_apart_and_a_cache_that_was_never_needed_are_remarks() -> None:
    reply = answer(traces.idle_cache)

    assert reply.advice == ()
    (apart,) = [note for note in reply.notes if "less room than another" in note]
    assert apart.startswith("GPU 1 had 8 GiB less room than another of the engine's GPUs: vLLM sizes")
    idle = "At most 10 % of the KV cache was in use in 1 d 5 h: a smaller card"
    assert any(note.startswith(idle) for note in reply.notes)


def test_starts_with_a_full_shared_memory_name_it() -> None:
    advice = only(traces.starts_with_a_full_shm)

    assert advice.summary == "The engine exits while it starts, with /dev/shm full."
    assert evidence(advice)["shm_room_bytes"] == 0
    assert flags(advice) == []


def test_a_prefix_cache_that_hits_12_percent_over_a_day() -> None:
    advice = only(traces.prefix_cache)

    assert evidence(advice)["hit_ratio"] == pytest.approx(0.12)
    assert advice.changes[0].flag is None
    assert flags(advice) == [(Flag.NO_ENABLE_PREFIX_CACHING, None)]
    assert advice.remark is not None
    assert advice.remark.startswith("This frees no memory")


def test_starts_that_exit_before_the_model_is_loaded_are_no_matter_of_memory() -> None:
    advice = only(traces.starts_without_nccl)

    assert advice.summary == "The engine exits early in its start, with GPU memory left."
    assert "NCCL" in advice.changes[0].text
    assert flags(advice) == []


def test_starts_that_run_out_take_less_and_then_go_without_graphs() -> None:
    advice = only(traces.start_up_runs_out, EngineArgs(gpu_memory_utilization=0.92, max_num_seqs=256))

    assert evidence(advice)["failed_starts"] == 3
    assert flags(advice) == [
        (Flag.GPU_MEMORY_UTILIZATION, 0.9),
        (Flag.MAX_NUM_SEQS, 128),
        (Flag.ENFORCE_EAGER, None),
        (Flag.TENSOR_PARALLEL_SIZE, 2),
    ]


def test_starts_beside_others_take_what_was_free_before() -> None:
    advice = only(traces.start_up_beside_others)

    assert advice.changes[0].flag is None
    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.61)]


def test_a_model_that_leaves_room_and_does_not_start_takes_more() -> None:
    advice = only(traces.model_does_not_fit)

    assert flags(advice) == [(Flag.GPU_MEMORY_UTILIZATION, 0.95), (Flag.TENSOR_PARALLEL_SIZE, 2)]
