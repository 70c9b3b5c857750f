"""What a request takes, of the KV cache and of the card."""

from __future__ import annotations

import pytest

from tests.samples import A_GPU, engine, failure, gpu, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.derive.per_request import Baselines, derive_baseline, derive_per_request
from vllm_headroom.model import EngineStatus, Sample
from vllm_headroom.vocabulary import EngineState, Source


def names(samples: tuple[Sample, ...]) -> dict[str, float]:
    return {sample.metric.name.removeprefix("headroom_engine_"): sample.value for sample in samples}


def test_tokens_and_bytes_per_running_request() -> None:
    sample = snapshot(engines=page(engine(running=4.0, kv_used_ratio=0.25, kv_capacity_tokens=1000.0)))

    assert names(derive_kv_cache(sample, bytes_per_token=512.0)) == {
        "kv_cache_capacity_bytes": 512_000.0,
        "kv_cache_tokens_per_running_request": 62.5,
        "kv_cache_bytes_per_running_request": 32_000.0,
    }


def test_by_tokens_the_cache_is_emptier_than_by_blocks() -> None:
    """The figures of vllm-project/vllm#57336: prompts of 17 tokens, in blocks of 16."""
    sample = snapshot(engines=page(engine(kv_used_ratio=0.667, kv_token_ratio=0.365)))

    assert names(derive_kv_cache(sample, bytes_per_token=None)) == {"kv_cache_token_used_ratio": 0.365}


def test_without_bytes_per_token_there_are_tokens_and_no_bytes() -> None:
    sample = snapshot(engines=page(engine(running=4.0, kv_used_ratio=0.25, kv_capacity_tokens=1000.0)))

    assert set(names(derive_kv_cache(sample, bytes_per_token=None))) == {"kv_cache_tokens_per_running_request"}


@pytest.mark.parametrize(("running", "ratio"), [(0.0, 0.5), (3.0, 0.0), (None, 0.5), (3.0, None)])
def test_nothing_is_said_per_request_when_nothing_runs_or_is_held(running: float | None, ratio: float | None) -> None:
    sample = snapshot(engines=page(engine(running=running, kv_used_ratio=ratio, kv_capacity_tokens=1000.0)))

    assert derive_kv_cache(sample, bytes_per_token=None) == ()


def test_a_failed_page_says_nothing() -> None:
    assert derive_kv_cache(snapshot(engines=failure(Source.ENGINE)), bytes_per_token=1.0) == ()
    assert derive_per_request(snapshot(engines=failure(Source.ENGINE))) == ()
    assert derive_per_request(snapshot(gpus=failure(Source.NVML))) == ()


def test_memory_per_running_request_is_over_the_requests_of_all_engines() -> None:
    sample = snapshot(
        engines=page(engine(name="0", running=3.0), engine(name="1", running=1.0)), gpus=(gpu(used=900, engine=800),)
    )

    assert values(derive_per_request(sample), catalog.MEMORY_PER_RUNNING_REQUEST) == {A_GPU: 200.0}


def test_memory_per_running_request_is_absent_while_nothing_runs_and_on_other_gpus() -> None:
    assert derive_per_request(snapshot(engines=page(engine(running=0.0)))) == ()
    assert derive_per_request(snapshot(engines=page(engine(running=2.0)), gpus=(gpu(attribution=None),))) == ()


def test_an_engine_that_died_between_the_readings_costs_nothing_that_is_known() -> None:
    sample = snapshot(
        engines=page(engine(running=2.0)),
        gpus=(gpu(used=0, engine=0),),
        engine_status=EngineStatus(state=EngineState.SERVING),
    )

    assert derive_per_request(sample) == ()
    assert derive_baseline(Baselines(), sample, configured_bytes=1.0)[1] == ()


def test_what_is_held_asleep_is_no_price_of_the_requests_that_are_frozen_in_it() -> None:
    frozen = engine(running=2.0, finished_total=5000.0, awake=False)
    sample = snapshot(engines=page(frozen), gpus=(gpu(used=40, engine=40),))
    state, samples = derive_baseline(Baselines(), sample, configured_bytes=None)

    assert derive_per_request(sample) == ()
    assert (samples, state.bands) == ((), {})
