"""Versions and options: none is advised that the version at hand does not have."""

from __future__ import annotations

import pytest

from tests.unit.commands.advise import traces
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import judge_facts
from vllm_headroom_tools.versions import OLDEST_SUPPORTED, Version, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.11.2", (0, 11, 2)),
        ("v0.11.0", (0, 11, 0)),
        ("0.11", (0, 11, 0)),
        ("0.9.2.post2", (0, 9, 2)),
        ("0.20.2+cu129", (0, 20, 2)),
        ("0.10.2rc1.dev5+gabc", (0, 10, 1)),
        ("0.11.0rc1", (0, 10, 0)),
        ("0.1.dev1234+gabcdef", None),
        ("0.3.3", None),
        ("dev", None),
        ("", None),
        ("1.0.0rc1", (1, 0, 0)),
    ],
)
def test_a_version_is_a_release_or_the_one_before_a_candidate(text: str, version: Version | None) -> None:
    assert parse_version(text) == version


def test_every_option_has_a_first_version() -> None:
    assert set(FIRST_VERSIONS) == set(Flag)
    assert min(FIRST_VERSIONS.values()) == OLDEST_SUPPORTED


def test_the_options_are_those_of_vllm() -> None:
    assert {str(flag): version for flag, version in FIRST_VERSIONS.items()} == {
        "--gpu-memory-utilization": (0, 4, 0),
        "--max-num-seqs": (0, 4, 0),
        "--max-model-len": (0, 4, 0),
        "--max-num-batched-tokens": (0, 4, 0),
        "--enforce-eager": (0, 4, 0),
        "--tensor-parallel-size": (0, 4, 0),
        "--data-parallel-size": (0, 8, 3),
        "--no-enable-prefix-caching": (0, 6, 5),
        "--kv-cache-memory-bytes": (0, 10, 2),
        "--mm-processor-cache-gb": (0, 11, 0),
        "--max-logprobs": (0, 4, 0),
        "--limit-mm-per-prompt": (0, 5, 5),
        "--mm-processor-kwargs": (0, 6, 3),
    }


@pytest.mark.parametrize(
    ("version", "flags", "note"),
    [
        ((0, 6, 5), [Flag.NO_ENABLE_PREFIX_CACHING], None),
        (
            (0, 6, 4),
            [],
            "no-enable-prefix-caching is no option of vLLM 0.6.4; 0.6.5 is the first that has it.",
        ),
        (None, [Flag.NO_ENABLE_PREFIX_CACHING], None),
    ],
)
def test_an_option_that_a_version_does_not_have_is_left_out_and_reported(
    version: Version | None, flags: list[Flag], note: str | None
) -> None:
    assessment = judge_facts(traces.seen(traces.prefix_cache).build_facts(EngineArgs(version=version)))

    (advice,) = assessment.advice
    assert [change.flag for change in advice.changes if change.flag] == flags
    left_out = [text.removeprefix("Left out: ") for text in assessment.notes if text.startswith("Left out: ")]
    assert left_out == ([] if note is None else [note])


def test_where_nothing_tells_the_version_only_options_that_all_have_are_advised() -> None:
    def bare() -> list[traces.Record]:
        records = []
        for record in traces.configuration_overshoot():
            (engine,) = record["engines"]
            for name in ("awake", "prefix_queries_total", "prefix_hits_total"):
                del engine[name]
            records.append(record)
        return records

    assessment = judge_facts(traces.facts(bare(), EngineArgs(sizes_cache_in_bytes=True, kv_cache_memory_bytes=2**36)))

    assert assessment.facts.settings.earliest_version == OLDEST_SUPPORTED
    assert [change.flag for advice in assessment.advice for change in advice.changes] == []
    assert any(note.startswith("Left out: kv-cache-memory-bytes") for note in assessment.notes)


def test_a_version_newer_than_those_looked_at_is_reported() -> None:
    assessment = judge_facts(traces.facts(traces.burst(), EngineArgs(version=(0, 40, 0))))

    assert any(note.startswith("vLLM 0.40.0 is newer than 0.33.0") for note in assessment.notes)
