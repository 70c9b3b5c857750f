"""Whatever the facts: no option that is not there, none from a leak, and none that changes it the wrong way."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_headroom.model import Ending, GpuAtEnd
from vllm_headroom.vocabulary import IncidentKind, LeakState
from vllm_headroom_tools.advise.command import build_report
from vllm_headroom_tools.advise.facts import (
    CappedFacts,
    EngineFacts,
    Extent,
    Facts,
    FactsSource,
    FullFacts,
    GpuFacts,
    HostFacts,
    Leak,
    PrefixFacts,
    Shortage,
    Spell,
)
from vllm_headroom_tools.advise.finding import Cause, Change
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import judge_facts
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.full_cache import ThrashFacts
from vllm_headroom_tools.history import Moment

OWN_OPTIONS = {"--vllm-version", "--engine-url", "--previous"}
CACHE = {Cause.KV_CACHE_BLOW_OUT, Cause.CONCURRENCY_MISJUDGED}

BYTES = st.floats(0, 2e11)
COUNT = st.sampled_from([0.0, 1.0, 30.0, 200.0, 5_000.0, 1e7]) | st.integers(0, 10**7).map(float)
RATIO = st.sampled_from([0.0, 0.1, 0.4]) | st.floats(0, 1)
SECONDS = st.sampled_from([0.0, 700.0, 30_000.0]) | st.floats(0, 1e6)
TOKENS = st.sampled_from([500.0, 2_000.0, 20_000.0, 400_000.0]) | st.floats(1, 1e6)
VERSION = st.sampled_from([(0, 4, 0), (0, 6, 4), (0, 6, 5), (0, 10, 1), (0, 10, 2), (0, 33, 0)]) | st.tuples(
    st.just(0), st.integers(4, 40), st.integers(0, 9)
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


LEAK = st.builds(
    Leak,
    state=st.sampled_from(LeakState),
    alarm=maybe(
        st.builds(
            Moment,
            seconds=SECONDS,
            bytes_per_second=maybe(BYTES),
            time_to_oom_seconds=maybe(SECONDS),
            time_to_oom_seconds_lower=maybe(SECONDS),
        )
    ),
    ended_seconds=maybe(SECONDS),
)
HEALTHY = st.just(Leak(state=LeakState.STABLE))
SPELL = st.builds(
    Spell,
    kind=st.sampled_from(Shortage),
    lowest_room_bytes=st.floats(0, 2**29),
    running=maybe(COUNT),
    has_engine_exited=st.booleans(),
)


def gpu(leak: st.SearchStrategy[Leak]) -> st.SearchStrategy[GpuFacts]:
    return st.builds(
        GpuFacts,
        index=st.integers(0, 7),
        uuid=st.just("GPU-a"),
        leak=leak,
        usable_bytes=maybe(st.floats(1e9, 2e11)),
        least_room_bytes=maybe(BYTES),
        others_memory=maybe(st.just(Extent(0.0, 0.0, 0.0)) | st.builds(Extent, BYTES, BYTES, BYTES)),
        spells=st.lists(SPELL, max_size=2).map(tuple),
        roomy_running=maybe(COUNT),
    )


ENGINE = st.builds(
    EngineFacts,
    model_name=st.just("m"),
    engine=st.just("0"),
    capacity_tokens=maybe(TOKENS),
    capacity_bytes=maybe(BYTES),
    highest_running=maybe(COUNT),
    finished=maybe(COUNT),
    usual_tokens=maybe(TOKENS),
    high_tokens=maybe(TOKENS),
    calm_running=maybe(COUNT),
    thrash=maybe(
        st.builds(
            ThrashFacts,
            times=st.integers(2, 100),
            seconds=SECONDS,
            returned=COUNT,
            finished=COUNT,
            running=COUNT,
            tokens=maybe(TOKENS),
        )
    ),
    full=maybe(
        st.builds(
            FullFacts,
            seconds=maybe(SECONDS),
            finished=COUNT,
            preemptions=COUNT,
            running=COUNT,
            tokens=maybe(TOKENS),
        )
    ),
    capped=maybe(st.builds(CappedFacts, seconds=SECONDS, running=COUNT, kv_used_ratio=RATIO)),
    prefix=maybe(
        st.just(PrefixFacts(queries=1e7, hits=1e6, seconds=30_000.0, blocked_ratio=0.0))
        | st.builds(
            PrefixFacts,
            queries=COUNT,
            hits=COUNT,
            seconds=maybe(SECONDS),
            blocked_ratio=RATIO,
            recent_ratio=maybe(RATIO),
        )
    ),
)
SETTINGS = st.builds(
    EngineArgs,
    version=maybe(VERSION),
    at_least=VERSION,
    gpu_memory_utilization=maybe(st.floats(0.01, 1)),
    sizes_cache_in_bytes=st.booleans(),
    kv_cache_memory_bytes=maybe(BYTES),
    max_num_seqs=maybe(st.integers(1, 4096)),
    max_model_len=maybe(st.integers(1, 10**6)),
    max_num_batched_tokens=maybe(st.integers(1, 10**6)),
)
AMOUNT = maybe(st.integers(0, 2**48))
AT_END = st.builds(
    GpuAtEnd,
    index=st.just(0),
    uuid=st.just("GPU-a"),
    total_bytes=AMOUNT,
    first_room_bytes=AMOUNT,
    last_room_bytes=AMOUNT,
    first_held_bytes=AMOUNT,
    last_engine_bytes=AMOUNT,
    last_other_bytes=AMOUNT,
)
END = st.builds(
    Ending,
    kind=st.just(IncidentKind.ENDED),
    seconds=SECONDS,
    has_served=st.booleans(),
    gpus=st.lists(AT_END, max_size=2).map(tuple),
    orphan_bytes=st.integers(0, 2**40),
)


def facts(leak: st.SearchStrategy[Leak] = LEAK) -> st.SearchStrategy[Facts]:
    return st.builds(
        Facts,
        origin=st.sampled_from(FactsSource),
        settings=SETTINGS,
        begin_seconds=st.just(0.0),
        end_seconds=SECONDS,
        gpus=st.lists(gpu(leak), max_size=2).map(tuple),
        engines=st.lists(ENGINE, max_size=2).map(tuple),
        hosts=st.lists(st.builds(HostFacts, process=st.just("worker"), leak=leak), max_size=1).map(tuple),
        ends=st.just(()) | st.lists(END, max_size=3).map(tuple),
    )


ENDED_BESIDE_OTHERS = Ending(
    kind=IncidentKind.ENDED,
    seconds=5.0,
    gpus=(GpuAtEnd(index=0, uuid="GPU-a", last_other_bytes=2 * 10**9, first_room_bytes=21 * 10**8),),
)
MORE_WAS_FREE_THAN_IS_THERE = Facts(
    origin=FactsSource.TRACE,
    settings=EngineArgs(),
    gpus=(GpuFacts(index=0, uuid="GPU-a", leak=Leak(state=LeakState.STABLE), usable_bytes=1e9),),
    ends=(ENDED_BESIDE_OTHERS, ENDED_BESIDE_OTHERS),
)


def changes(drawn_facts: Facts) -> list[tuple[str, Change]]:
    return [(advice.cause, change) for advice in judge_facts(drawn_facts).advice for change in advice.changes]


@given(facts(HEALTHY) | facts())
@settings(max_examples=300, deadline=None)
def test_no_option_is_named_that_this_version_does_not_have(drawn_facts: Facts) -> None:
    assessment = judge_facts(drawn_facts)
    there = {str(flag) for flag in Flag if FIRST_VERSIONS[flag] <= drawn_facts.settings.earliest_version}

    for words in (
        "\n".join(build_report(assessment).lines),
        json.dumps(build_report(assessment).data, allow_nan=False),
    ):
        assert set(re.findall(r"--[a-z][a-z-]*", words)) <= there | OWN_OPTIONS


@given(facts(HEALTHY) | facts())
@example(MORE_WAS_FREE_THAN_IS_THERE)
@settings(max_examples=300, deadline=None)
def test_every_value_is_one_that_vllm_takes(drawn_facts: Facts) -> None:
    for _, change in changes(drawn_facts):
        if change.flag is Flag.GPU_MEMORY_UTILIZATION and change.value is not None:
            assert 0 < change.value <= 1
            assert change.value != drawn_facts.settings.gpu_memory_utilization
        elif change.value is not None:
            assert change.value >= 1
            assert change.value == int(change.value)


@given(facts())
@settings(max_examples=300, deadline=None)
def test_a_leaking_or_growing_engine_is_reported_no_option(drawn_facts: Facts) -> None:
    grows = {LeakState.GROWING, LeakState.LEAKING}
    leaks = [*(leaking_gpu.leak for leaking_gpu in drawn_facts.gpus), *(host.leak for host in drawn_facts.hosts)]
    if any(leak.alarm or leak.state in grows for leak in leaks):
        assert all(change.flag is None for _, change in changes(drawn_facts))


@given(facts(HEALTHY))
@settings(max_examples=300, deadline=None)
def test_the_cache_is_never_made_smaller_because_it_is_full_nor_larger_because_memory_is_short(
    drawn_facts: Facts,
) -> None:
    now = drawn_facts.settings.gpu_memory_utilization
    for cause, change in changes(drawn_facts):
        if change.flag is not Flag.GPU_MEMORY_UTILIZATION:
            continue
        raised = change.difference > 0 if change.difference is not None else (change.value or 0) > (now or 0)
        if cause in CACHE:
            assert raised
        if cause in {Cause.CONFIGURATION_OVERSHOOT, Cause.CHRONIC, Cause.BURST, Cause.ANOTHER_TENANT}:
            assert not raised


@given(facts(HEALTHY))
@settings(max_examples=300, deadline=None)
def test_no_two_changes_pull_one_option_apart(drawn_facts: Facts) -> None:
    now = drawn_facts.settings.gpu_memory_utilization
    sizes = {Flag.GPU_MEMORY_UTILIZATION: now, Flag.KV_CACHE_MEMORY_BYTES: drawn_facts.settings.kv_cache_memory_bytes}
    for flag, configured_value in sizes.items():
        ways = {
            (change.difference if change.difference is not None else (change.value or 0) - (configured_value or 0)) > 0
            for _, change in changes(drawn_facts)
            if change.flag is flag and (change.difference is not None or configured_value is not None)
        }
        assert len(ways) <= 1


@given(facts(HEALTHY) | facts())
@settings(max_examples=300, deadline=None)
def test_nothing_to_change_is_said_only_where_nothing_is_missing(drawn_facts: Facts) -> None:
    assessment = judge_facts(drawn_facts)

    assert (assessment.verdict is Conclusion.NOT_GOOD) == bool(assessment.advice)
    if assessment.verdict is Conclusion.GOOD:
        assert not assessment.missing
