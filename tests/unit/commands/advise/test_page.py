"""The page of a sidecar: the present, said as such."""

from __future__ import annotations

import pytest

from tests.unit.commands.advise.pages import (
    ENGINE,
    MIB,
    Lines,
    healthy,
    host_state,
    line,
    of_engine,
    of_gpu,
    state,
    text,
)
from vllm_headroom import catalog
from vllm_headroom.vocabulary import LogFailureKind
from vllm_headroom_tools.advise.facts import Extent, Facts
from vllm_headroom_tools.advise.finding import Cause
from vllm_headroom_tools.advise.page import parse_facts
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import Assessment, judge_facts
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion

FULL: Lines = {
    of_engine(catalog.ENGINE_KV_USED): 0.99,
    of_engine(catalog.ENGINE_RUNNING): 198,
    of_engine(catalog.ENGINE_WAITING): 300,
}


def facts(lines: Lines, settings: EngineArgs | None = None) -> Facts:
    return parse_facts(text(lines), settings or EngineArgs())


def answer(lines: Lines) -> Assessment:
    return judge_facts(facts(lines))


def causes(lines: Lines) -> list[Cause | LogFailureKind]:
    return [advice.cause for advice in answer(lines).advice]


def test_a_healthy_page_is_advised_nothing_now() -> None:
    reply = answer(healthy())

    assert (reply.verdict, reply.missing) == (Conclusion.GOOD, ())
    assert any(note.startswith("One page shows a moment") for note in reply.notes)


def test_the_share_that_vllm_may_take_comes_from_its_budget() -> None:
    assert facts(healthy()).settings.gpu_memory_utilization == pytest.approx(0.92)
    assert facts(healthy(), EngineArgs(gpu_memory_utilization=0.8)).settings.gpu_memory_utilization == 0.8


def test_what_is_on_the_page_shows_how_new_vllm_is_at_least() -> None:
    older = healthy() | {line(catalog.INPUT_AVAILABLE, {"input": "sleep_state"}): 0}

    assert facts(healthy()).settings.earliest_version == (0, 11, 1)
    assert facts(older).settings.earliest_version == (0, 4, 0)
    assert facts(
        older | {line(catalog.INPUT_AVAILABLE, {"input": "prefix_cache_queries"}): 1}
    ).settings.earliest_version == (
        0,
        7,
        3,
    )
    assert facts(healthy(), EngineArgs(version=(0, 6, 3))).settings.earliest_version == (0, 6, 3)


def test_little_left_now_is_an_overshoot_with_a_value() -> None:
    (advice,) = answer(healthy(engine_mib=80_800)).advice

    assert (advice.cause, advice.summary) == (
        Cause.CONFIGURATION_OVERSHOOT,
        "vLLM takes more of GPU 0 than it can spare now.",
    )
    assert [(change.flag, change.value) for change in advice.changes] == [(Flag.GPU_MEMORY_UTILIZATION, 0.9)]


def test_a_page_that_says_over_budget_is_advised_the_share_that_gives_the_excess_back() -> None:
    excess_mib = 79_700 - 0.92 * 81_559
    over = {
        line(catalog.SITUATION, {"situation": "over_budget"}): 1,
        of_gpu(catalog.MEMORY_DISCREPANCY, basis="budget"): excess_mib * MIB,
    }

    (advice,) = answer(healthy(engine_mib=79_700) | over).advice

    assert advice.cause is Cause.OVER_BUDGET
    assert [(change.flag, change.value) for change in advice.changes] == [(Flag.GPU_MEMORY_UTILIZATION, 0.86)]


def test_a_peak_of_the_last_minute_is_a_burst() -> None:
    assert causes(healthy(peak_mib=80_900)) == [Cause.BURST]


def test_a_leaking_page_is_reported_no_option() -> None:
    leaking = {
        of_gpu(catalog.LEAK_RATE): 1e6,
        of_gpu(catalog.TIME_TO_OOM): 1000,
        of_gpu(catalog.TIME_TO_OOM_LOWER): 600,
    }

    (advice,) = answer(healthy(engine_mib=80_900) | state("leaking") | leaking).advice

    assert advice.cause is Cause.GPU_LEAK
    assert "within 10 min" in advice.changes[0].text
    assert all(change.flag is None for change in advice.changes)


def test_a_card_that_fills_by_whom_is_not_known_is_first_to_be_looked_at_and_blames_nobody() -> None:
    filling = healthy(engine_mib=80_900) | state("leaking") | {of_gpu(catalog.TIME_TO_OOM): 1000}
    del filling[of_gpu(catalog.GPU_MEMORY_HELD, holder="engine")]

    (advice,) = answer(filling).advice
    (alone,) = answer(filling | {of_gpu(catalog.GPU_PROCESSES): 1}).advice

    assert advice.summary == "GPU 0 fills, by whom is not known; every process on the card is affected."
    assert "which process grows" in advice.changes[0].text
    assert alone.summary == "The engine leaks GPU memory on GPU 0."


def test_a_host_leak_is_found() -> None:
    rate = {line(catalog.HOST_LEAK_RATE, {"process": "worker"}): 5e4}

    assert causes(healthy() | host_state("leaking") | rate) == [Cause.HOST_LEAK]


def test_another_tenant_is_reported_as_of_now() -> None:
    (advice,) = answer(healthy(other_mib=3_000)).advice

    assert advice.summary == "Another process takes memory of GPU 0 now."


def test_memory_of_nobody_up_to_200_mib_is_the_drivers() -> None:
    unknown = {of_gpu(catalog.GPU_MEMORY_USED): 75_190 * MIB}

    assert facts(healthy() | unknown).gpus[0].others_memory == Extent(0, 0, 0)


def test_a_full_cache_that_hardly_preempts_is_no_trouble() -> None:
    assert answer(healthy() | FULL | {of_engine(catalog.ENGINE_PREEMPTIONS): 500}).verdict is Conclusion.GOOD


def test_a_full_cache_that_preempts_is_reported_as_of_now() -> None:
    (advice,) = answer(healthy() | FULL | {of_engine(catalog.ENGINE_PREEMPTIONS): 25_000}).advice

    assert advice.cause is Cause.CONCURRENCY_MISJUDGED
    assert "holds now" in advice.summary
    assert (advice.changes[0].flag, advice.changes[0].value) == (Flag.MAX_NUM_SEQS, 180)
    assert all(change.flag is not Flag.GPU_MEMORY_UTILIZATION for change in advice.changes)


def hits(ratio: float, *, recent: float, queries: float = 3e6) -> Lines:
    return {
        of_engine(catalog.ENGINE_PREFIX_QUERIES): queries,
        of_engine(catalog.ENGINE_PREFIX_HITS): ratio * queries,
        of_engine(catalog.ENGINE_PREFIX_HIT_RATIO): recent,
    }


@pytest.mark.parametrize(
    ("lines", "expected_causes"),
    [
        (hits(0.1, recent=0.1), [Cause.PREFIX_CACHE]),
        (hits(0.1, recent=0.5), []),
        (hits(0.5, recent=0.1), []),
        (hits(0.1, recent=0.1, queries=1e6), []),
        (hits(0.1, recent=0.1) | {of_engine(catalog.ENGINE_WAITING): 1}, []),
    ],
)
def test_a_prefix_cache_is_judged_by_the_run_and_the_last_minutes_together(
    lines: Lines, expected_causes: list[Cause]
) -> None:
    assert causes(healthy() | lines) == expected_causes


def test_a_cache_sized_in_bytes_is_advised_by_how_much_to_change_it() -> None:
    sized = {line(catalog.INPUT_AVAILABLE, {"input": "kv_cache_memory_bytes"}): 1}
    page = {key: value for key, value in healthy(engine_mib=80_800).items() if key[0] is not catalog.MEMORY_REPORTED}

    (advice,) = answer(page | sized).advice

    (change,) = advice.changes
    assert (change.flag, change.value, change.difference) == (Flag.KV_CACHE_MEMORY_BYTES, None, -844 * MIB)


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ({line(catalog.SAMPLE_AGE, {}): 400}, "the page is 6 min 40 s old: the sidecar has stopped sampling"),
        (
            state("warming_up"),
            "GPU 0: the leak detector is warming up: look again after at most an hour of work",
        ),
        (state("growing"), "GPU 0: it grows, and within hours it shows whether that is a leak: look again"),
        (state("asleep"), "GPU 0: the engine sleeps"),
        (state("none"), "GPU 0: the engine's memory, or its load, is not known"),
        (
            {of_engine(catalog.ENGINE_RUNNING): 0, of_engine(catalog.ENGINE_FINISHED): 0},
            "load: no request ran, and the effect of load is not known",
        ),
    ],
)
def test_what_is_not_known_is_named_and_not_called_healthy(lines: Lines, missing: str) -> None:
    reply = answer(healthy() | lines)

    assert (reply.verdict, reply.missing) == (Conclusion.CANNOT_TELL, (missing,))


@pytest.mark.parametrize(
    ("absent_metric", "missing"),
    [
        (catalog.GPU_INFO, "memory of the engine's GPUs: no GPU is known to be the engine's"),
        (catalog.GPU_MEMORY_USED, "GPU 0: its memory was not read"),
        (catalog.ENGINE_INFO, "the engine's own page: it was not read"),
        (catalog.ENGINE_KV_USED, "m: how much of its KV cache is in use is not known"),
        (catalog.ENGINE_PREEMPTIONS, "m: its preemptions are not known"),
    ],
)
def test_what_is_not_on_the_page_is_missing(absent_metric: object, missing: str) -> None:
    reply = answer({key: value for key, value in healthy().items() if key[0] is not absent_metric})

    assert (reply.verdict, reply.missing) == (Conclusion.CANNOT_TELL, (missing,))


def test_a_gpu_that_is_not_the_engines_is_left_out() -> None:
    other_gpu_lines = {line(catalog.GPU_INFO, {"gpu": "1", "uuid": "GPU-b", "name": "H100", "attribution": ""}): 1.0}

    assert [gpu.index for gpu in facts(healthy() | other_gpu_lines).gpus] == [0]


def test_ranks_are_named_where_there_are_several() -> None:
    second = {
        line(metric, ENGINE | {"engine": "1", **dict(labels)} | {"engine": "1"}): value
        for (metric, labels), value in healthy().items()
        if metric.name.startswith("headroom_engine_")
    }
    thrashing = FULL | {of_engine(catalog.ENGINE_PREEMPTIONS): 25_000}

    (advice,) = answer(healthy() | second | thrashing).advice

    assert "of m, engine 0 holds" in advice.summary


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<html>", "the page is not in Prometheus's format"),
        ("vllm:num_requests_running 1\n", "the page is not vllm-headroom's"),
        (text(healthy()).replace('gpu="0"', 'gpu="first"'), "the page is not vllm-headroom's"),
        (text(healthy()).replace('"0"', '"' + "9" * 5000 + '"'), "the page is not vllm-headroom's"),
        (text(healthy()).replace('profile="vllm"', 'profile="sglang"'), "the engine behind this page is not vLLM"),
    ],
)
def test_another_page_is_refused_with_its_reason(page: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_facts(page, EngineArgs())

    assert str(refused.value).startswith(why)


def test_requests_that_one_engine_does_not_tell_are_unknown_in_all() -> None:
    crowded = healthy(engine_mib=80_700)
    second_engine = {line(catalog.ENGINE_INFO, {"model_name": "m", "engine": "1", "profile": "vllm"}): 1.0}

    assert facts(crowded).gpus[0].spells[0].running == 80
    assert facts(crowded | second_engine).gpus[0].spells[0].running is None
