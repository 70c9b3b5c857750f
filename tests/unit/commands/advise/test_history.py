"""What is gathered of a trace, and what a gap, a change of settings or a sleep makes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.commands.advise import traces
from vllm_headroom_tools.advise.facts import EngineFacts, Shortage
from vllm_headroom_tools.advise.finding import Cause
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.advise.verdict import judge_facts
from vllm_headroom_tools.conclusion import Conclusion


def engine(records: traces.Records) -> EngineFacts:
    (engine_facts,) = traces.facts(records).engines
    return engine_facts


def test_counters_go_on_over_a_restart() -> None:
    began_seconds = traces.BEGAN + 3600
    records = [
        traces.sample(step, began_seconds=began_seconds if step >= 120 else traces.BEGAN, preemptions_total=step % 120)
        for step in range(240)
    ]

    engine_facts = engine(records)

    assert engine_facts.finished == 119 * 300 + 119 * 300
    assert engine_facts.prefix is not None
    assert engine_facts.prefix.queries == 1_500 * engine_facts.finished


def test_the_usual_and_the_high_size_of_requests() -> None:
    engine_facts = engine(
        traces.sample(step, running=10, kv_used_ratio=0.5 if step % 100 == 0 else 0.1) for step in range(1000)
    )

    assert (engine_facts.usual_tokens, engine_facts.high_tokens) == (4_000, 4_000)
    assert (
        engine(
            traces.sample(step, running=10, kv_used_ratio=0.5 if step % 20 == 0 else 0.1) for step in range(1000)
        ).high_tokens
        == 20_000
    )


def test_what_runs_while_or_just_after_the_cache_is_full_is_no_calm() -> None:
    engine_facts = engine(
        traces.sample(
            step,
            running={1: 200, 2: 190, 3: 180}.get(step % 10, 100),
            kv_used_ratio={1: 0.99, 2: 0.9, 3: 0.9}.get(step % 10, 0.5),
            preemptions_total=10 * ((step + 8) // 10) + 10 * ((step + 7) // 10),
        )
        for step in range(200)
    )

    assert engine_facts.calm_running == 100
    assert engine_facts.full is not None
    assert (engine_facts.full.running, engine_facts.full.seconds) == (200, 600)


def test_what_was_seen_under_other_settings_says_nothing_of_these() -> None:
    """A first half with 180 MiB left, then a smaller KV cache and room."""

    def changed() -> Iterator[traces.Record]:
        for step in traces.steps(16):
            if step < 960:
                yield traces.sample(step, engine_mib=traces.USABLE_MIB - 200)
            else:
                yield traces.sample(step, began_seconds=traces.BEGAN + 8 * 3600, kv_capacity_tokens=380_000)

    assessment = judge_facts(traces.facts(changed()))

    assert assessment.verdict is Conclusion.GOOD
    assert assessment.facts.span_seconds == pytest.approx(8 * 3600, abs=60)
    assert assessment.notes[0].startswith("Judged since 2025-10-09 16:53:20Z")


def test_an_equal_start_is_no_change_of_settings() -> None:
    records = [traces.sample(step, kv_capacity_tokens=400_000 + (step > 500) * 1_000) for step in range(960)]

    assert traces.facts(records).since_seconds is None


def test_what_a_start_takes_for_a_moment_is_no_shortage() -> None:
    def loading() -> Iterator[traces.Record]:
        for step in range(10):
            yield traces.down(step, engine_mib=traces.USABLE_MIB - 100, began_seconds=traces.BEGAN)
        for step in range(10, 960):
            yield traces.sample(step)

    (gpu,) = traces.facts(loading()).gpus

    assert gpu.spells == ()


def test_a_spell_that_comes_and_goes_for_hours_is_made_of_peaks() -> None:
    records = [
        traces.sample(step, engine_mib=traces.USABLE_MIB - (140 if step % 8 == 0 else 2_000)) for step in range(960)
    ]

    (gpu,) = traces.facts(records).gpus

    assert [spell.kind for spell in gpu.spells] == [Shortage.PEAK]


def test_one_start_that_failed_may_be_a_person_who_changed_their_mind() -> None:
    records = [record for step, record in enumerate(traces.start_up_runs_out()) if step < 20]

    assessment = judge_facts(traces.facts(records))

    assert assessment.verdict is Conclusion.CANNOT_TELL
    assert len(assessment.facts.failed_starts) == 1


def test_starts_are_seen_by_the_memory_where_processes_are_not() -> None:
    records = [{**record, "processes": None} for record in traces.start_up_runs_out()]

    assert [advice.cause for advice in judge_facts(traces.facts(records)).advice] == [Cause.START_UP]


def test_an_engine_that_dies_and_comes_back_failed_no_start() -> None:
    assert traces.facts(traces.burst_that_ends_the_engine()).failed_starts == ()


def test_samples_without_gpus_or_engines_are_passed_over() -> None:
    records = [
        {
            **record,
            "gpus": None if step % 50 == 0 else record["gpus"],
            "engines": None if step % 51 == 0 else record["engines"],
        }
        for step, record in enumerate(traces.healthy())
    ]

    assert judge_facts(traces.facts(records)).verdict is Conclusion.GOOD


def test_a_short_trace_is_not_called_healthy() -> None:
    assessment = judge_facts(traces.facts(traces.healthy(0.5)))

    assert assessment.verdict is Conclusion.CANNOT_TELL
    assert "a longer history: it covers 29 min 30 s, and an hour is needed" in assessment.missing


def test_a_prefix_cache_is_not_judged_while_requests_wait_in_an_old_version() -> None:
    records = [{**record, "engines": [record["engines"][0] | {"waiting": 5}]} for record in traces.prefix_cache()]
    trace_history = traces.history(records)

    old, new = (
        judge_facts(trace_history.build_facts(EngineArgs(version=version))) for version in ((0, 26, 0), (0, 27, 0))
    )

    assert old.advice == ()
    assert any("is not reliable" in note for note in old.notes)
    assert [advice.cause for advice in new.advice] == [Cause.PREFIX_CACHE]


def test_a_prefix_cache_is_not_judged_by_four_hours() -> None:
    records = [record for step, record in enumerate(traces.prefix_cache()) if step < 480]

    assessment = judge_facts(traces.facts(records))

    assert assessment.verdict is Conclusion.GOOD
    assert any(note.startswith("Too little was looked up in the prefix cache") for note in assessment.notes)


def test_a_trace_of_nothing_is_shown_what_it_lacks() -> None:
    assessment = judge_facts(traces.facts([{"t": 1.0}, {"t": 4000.0}]))

    assert assessment.verdict is Conclusion.CANNOT_TELL
    assert assessment.missing == (
        "memory of the engine's GPUs: no GPU is known to be the engine's",
        "the engine's own page: it was not read",
    )
