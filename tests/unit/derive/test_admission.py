"""The most requests that were seen to run at once, as a limit on how many more may."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import AN_ENGINE, engine, failure, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.admission import FULL_BATCH_SAMPLES, Batches, derive_admission
from vllm_headroom.model import EngineStatus, Failure
from vllm_headroom.vocabulary import EngineState, Source

Look = tuple[float, float, float]
"""Requests running and waiting, and the share of the KV cache in use."""

QUEUED: Look = (16.0, 5.0, 0.4)
QUIET: Look = (10.0, 0.0, 0.1)


def more(*looks: Look | Failure, restarts: tuple[int, ...] = ()) -> float | None:
    """Return the additional requests after the last look."""
    state, additional_requests = Batches(), None
    for place, look in enumerate(looks):
        engines = (
            look if isinstance(look, Failure) else page(engine(running=look[0], waiting=look[1], kv_used_ratio=look[2]))
        )
        tick_snapshot = snapshot(at=5.0 * place, engines=engines)
        if restarts:
            tick_snapshot = replace(
                tick_snapshot, engine_status=EngineStatus(state=EngineState.SERVING, restarts=restarts[place])
            )
        state, samples = derive_admission(state, tick_snapshot)
        additional_requests = values(samples, catalog.ENGINE_ADDITIONAL_REQUESTS).get(AN_ENGINE)
    return additional_requests


def test_what_fits_the_cache_is_said_while_no_limit_is_known() -> None:
    assert more(QUIET) == 90
    assert more(*[QUEUED] * (FULL_BATCH_SAMPLES - 1), QUIET) == 90, "a queue of a moment tells no limit"


def test_what_runs_while_others_wait_again_and_again_is_the_limit() -> None:
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES) == 0
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES, QUIET) == 6
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES, failure(Source.ENGINE), QUIET) == 6


def test_the_cache_still_limits_below_the_batch() -> None:
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES, (10.0, 0.0, 0.8)) == 2


def test_more_running_than_the_limit_was_no_limit() -> None:
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES, (20.0, 0.0, 0.2)) == 80


def test_waiting_for_the_cache_tells_nothing_of_the_batch() -> None:
    assert more(*[(16.0, 5.0, 0.98)] * 9, QUIET) == 90


def test_a_limit_that_was_read_is_not_known_while_it_is_missing() -> None:
    """The KV cache alone would have room for thousands more."""
    state, additional_requests = Batches(), []
    for max_num_seqs in (30.0, None, 30.0):
        look = page(engine(running=10.0, waiting=0.0, kv_used_ratio=0.001, max_num_seqs=max_num_seqs))
        state, samples = derive_admission(state, snapshot(engines=look))
        additional_requests.append(values(samples, catalog.ENGINE_ADDITIONAL_REQUESTS).get(AN_ENGINE))

    assert additional_requests == [20, None, 20]


@pytest.mark.parametrize(("restarts", "expected"), [((0, 0, 0, 0), 6), ((0, 0, 0, 1), 90)])
def test_another_run_may_have_another_limit(restarts: tuple[int, ...], expected: float) -> None:
    assert more(*[QUEUED] * FULL_BATCH_SAMPLES, QUIET, restarts=restarts) == expected


@pytest.mark.parametrize("doing", [EngineState.ASLEEP, EngineState.STALLED])
def test_what_is_frozen_in_an_engine_tells_no_limit_and_nothing_more_fits(doing: EngineState) -> None:
    state, frozen = Batches(), page(engine(running=3.0, waiting=5.0, kv_used_ratio=0.1))
    for place in range(2 * FULL_BATCH_SAMPLES):
        sample = snapshot(at=5.0 * place, engines=frozen)
        state, samples = derive_admission(state, replace(sample, engine_status=EngineStatus(state=doing)))
        assert not samples
    _, samples = derive_admission(state, replace(sample, engine_status=EngineStatus(state=EngineState.SERVING)))

    assert values(samples, catalog.ENGINE_ADDITIONAL_REQUESTS)[AN_ENGINE] == 27


def test_how_many_more_fit_needs_no_capacity() -> None:
    assert more((3.0, 0.0, 0.7)) == 1
    assert more((5.0, 0.0, 1.0)) == 0


@pytest.mark.parametrize(("running", "ratio"), [(0.0, 0.5), (3.0, 0.0), (None, 0.5), (3.0, None)])
def test_nothing_is_said_when_nothing_runs_or_is_held(running: float | None, ratio: float | None) -> None:
    assert derive_admission(Batches(), snapshot(engines=page(engine(running=running, kv_used_ratio=ratio))))[1] == ()


def test_engines_are_distinguished() -> None:
    engine_page = page(
        engine(name="0", running=1.0, kv_used_ratio=0.5), engine(name="1", running=1.0, kv_used_ratio=0.25)
    )

    _, samples = derive_admission(Batches(), snapshot(engines=engine_page))

    assert values(samples, catalog.ENGINE_ADDITIONAL_REQUESTS) == {AN_ENGINE: 1.0, ("m", "1"): 3.0}
