"""The most requests that were seen to run at once, as a limit on how many more may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.samples import AN_ENGINE, engine, failure, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.admission import TIMES, Batches, within_batch
from vllm_headroom.derive.kv_cache import kv_cache
from vllm_headroom.model import Failure, Life
from vllm_headroom.vocabulary import EngineState, Source

Look = tuple[float, float, float]
"""Requests running and waiting, and the share of the KV cache in use."""

QUEUED: Look = (16.0, 5.0, 0.4)
QUIET: Look = (10.0, 0.0, 0.1)


def more(*looks: Look | Failure, restarts: tuple[int, ...] = ()) -> float | None:
    """Return the additional requests after the last look."""
    ask = within_batch(lambda seen: kv_cache(seen, bytes_per_token=None))
    state, last = Batches(), None
    for place, look in enumerate(looks):
        engines = (
            look if isinstance(look, Failure) else page(engine(running=look[0], waiting=look[1], kv_used_ratio=look[2]))
        )
        seen = snapshot(at=5.0 * place, engines=engines)
        if restarts:
            seen = replace(seen, life=Life(state=EngineState.SERVING, restarts=restarts[place]))
        state, samples = ask(state, seen)
        last = values(samples, catalog.ENGINE_ADDITIONAL_REQUESTS).get(AN_ENGINE)
    return last


def test_what_fits_the_cache_is_said_while_no_limit_is_known() -> None:
    assert more(QUIET) == 90
    assert more(*[QUEUED] * (TIMES - 1), QUIET) == 90, "a queue of a moment tells no limit"


def test_what_runs_while_others_wait_again_and_again_is_the_limit() -> None:
    assert more(*[QUEUED] * TIMES) == 0
    assert more(*[QUEUED] * TIMES, QUIET) == 6
    assert more(*[QUEUED] * TIMES, failure(Source.ENGINE), QUIET) == 6


def test_the_cache_still_limits_below_the_batch() -> None:
    assert more(*[QUEUED] * TIMES, (10.0, 0.0, 0.8)) == 2


def test_more_running_than_the_limit_was_no_limit() -> None:
    assert more(*[QUEUED] * TIMES, (20.0, 0.0, 0.2)) == 80


def test_waiting_for_the_cache_tells_nothing_of_the_batch() -> None:
    assert more(*[(16.0, 5.0, 0.98)] * 9, QUIET) == 90


@pytest.mark.parametrize(("restarts", "expected"), [((0, 0, 0, 0), 6), ((0, 0, 0, 1), 90)])
def test_another_life_may_have_another_limit(restarts: tuple[int, ...], expected: float) -> None:
    assert more(*[QUEUED] * TIMES, QUIET, restarts=restarts) == expected
