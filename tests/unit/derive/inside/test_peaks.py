"""Peaks by the kind of work: what they are a share of, and which requests still fit."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from tests.samples import A_GPU, engine, gpu, page, probed, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.peaks import derive_peaks, find_largest_size, fit_sizes
from vllm_headroom.model import (
    AllocatorReading,
    Inside,
    PeakReadings,
    ProbeReadings,
    Sample,
    SizePeak,
    StepFacts,
    WorkPeak,
    WorkPeaks,
)
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import Work

DOUBLINGS: Final = (128, 256, 512, 1024, 2048)
TOKEN_BYTES: Final = 300_000
BASE_BYTES: Final = 40 * MIB


def sized(*sizes: int, token_bytes: int = TOKEN_BYTES, steps: int = 3) -> tuple[SizePeak, ...]:
    return tuple(SizePeak(size=size, transient_bytes=BASE_BYTES + token_bytes * size, steps=steps) for size in sizes)


def work(kind: Work, sizes: tuple[SizePeak, ...] = sized(*DOUBLINGS), recent: int | None = None) -> WorkPeaks:
    step = StepFacts(at_seconds=1.0, requests=1)
    largest = max(sizes, key=lambda peak: peak.transient_bytes, default=None)
    highest = None
    if largest is not None:
        highest = WorkPeak(transient_bytes=largest.transient_bytes, size=largest.size, step=step)
    return WorkPeaks(
        work=kind,
        sizes=sizes,
        highest=highest,
        recent=None if recent is None else WorkPeak(transient_bytes=recent, size=1, step=step),
    )


def derived(
    *works: WorkPeaks, free: int = GIB, unused: int = 0, reserved_now: int | None = None, **limits: Any
) -> tuple[Sample, ...]:
    """The samples of a GPU with so much free memory, and so much that torch holds unused."""
    peak_limits = {"batch_tokens": 8192, "model_tokens": 16_384} | limits
    peaks = PeakReadings(
        works=works,
        resting_allocated_bytes=10 * GIB,
        resting_reserved_bytes=10 * GIB + unused + MIB,
        resting_split_bytes=MIB,
        **peak_limits,
    )
    process = probed(devices=(AllocatorReading(uuid="gpu-A"),), peaks=peaks)
    inside = Inside(reserved_bytes=reserved_now) if reserved_now is not None else None
    card = gpu(total=80 * GIB, used=80 * GIB - free, inside=inside)
    engines = page(engine(kv_capacity_tokens=100_000.0, kv_used_ratio=0.9))
    return derive_peaks(snapshot(engines=engines, gpus=(card,), probe=ProbeReadings(present=(process,))))


def test_a_peak_is_a_share_of_free_and_unused_memory() -> None:
    samples = derived(work(Work.DECODE, (), recent=GIB), free=3 * GIB, unused=GIB)

    assert values(samples, catalog.ENGINE_PEAK) == {(*A_GPU, "decode"): float(GIB)}
    assert values(samples, catalog.ENGINE_PEAK_RATIO) == {(*A_GPU, "decode"): 0.25}
    assert values(samples, catalog.ENGINE_PEAK_ROOM) == {A_GPU: 4.0 * GIB}


def test_what_torch_gave_back_since_is_not_counted_twice() -> None:
    samples = derived(free=3 * GIB, unused=2 * GIB, reserved_now=10 * GIB + MIB)

    assert values(samples, catalog.ENGINE_PEAK_ROOM) == {A_GPU: 3.0 * GIB}


def test_a_larger_request_cannot_use_all_that_torch_holds() -> None:
    def tokens(**room: int) -> float:
        samples = derived(work(Work.PROMPT_LOGPROBS), **room)
        return values(samples, catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS)[A_GPU]

    assert tokens(free=0, unused=GIB) == pytest.approx(tokens(free=int(0.7 * GIB)), abs=1)


def test_a_kind_without_a_recent_step_has_no_peak() -> None:
    assert values(derived(work(Work.PREFILL)), catalog.ENGINE_PEAK) == {}


@pytest.mark.parametrize(
    "sizes",
    [(), sized(128, 256, 512, steps=99), sized(*DOUBLINGS, steps=1), sized(1, 2, 4, 8, 4096), sized(0, 0, 0, 0)],
)
def test_a_kind_that_was_seen_too_seldom_is_not_predicted(sizes: tuple[SizePeak, ...]) -> None:
    samples = derived(work(Work.PREFILL, sizes))

    assert values(samples, catalog.ENGINE_SAFE_PROMPT_TOKENS) == {}
    assert values(samples, catalog.ENGINE_PEAK_SPREAD) == {}


def test_a_request_twice_as_large_as_any_is_predicted_within_the_interval() -> None:
    """Peaks that scatter by a hundredth of their size and by torch's rounding, in 1,000 tables."""
    chance = random.Random(58)  # noqa: S311 - not for secrets
    inside = 0
    widths = 0.0
    for _ in range(1000):

        def peak(size: int) -> float:
            exact = BASE_BYTES + TOKEN_BYTES * size
            return exact * (1 + chance.gauss(0, 0.01)) + chance.uniform(0, 2 * MIB)

        sizes = [int(2 ** (7 + step / 2)) for step in range(8)]
        fit = fit_sizes(tuple(SizePeak(size=size, transient_bytes=int(peak(size)), steps=5) for size in sizes))
        assert fit is not None
        twice = 2 * sizes[-1]
        inside += abs(peak(twice) - fit.predict_bytes(twice)) <= fit.measure_spread(twice)

        widths += fit.measure_spread(twice) / fit.predict_bytes(twice)

    assert inside >= 900
    assert widths / 1000 < 0.1


def test_the_largest_safe_size_fits_and_the_next_does_not() -> None:
    fit = fit_sizes(sized(*DOUBLINGS))
    assert fit is not None
    size = find_largest_size(fit, GIB, 8192)

    assert fit.predict_upper_bytes(size) <= GIB < fit.predict_upper_bytes(size + 1)
    assert size == pytest.approx((GIB - BASE_BYTES) / TOKEN_BYTES, rel=0.02)
    assert find_largest_size(fit, 0, 8192) == 0


def test_a_prompt_whose_steps_fit_is_limited_by_the_cache_and_the_model() -> None:
    def tokens(**limits: Any) -> dict[tuple[str, ...], float]:
        return values(derived(work(Work.PREFILL), free=8 * GIB, **limits), catalog.ENGINE_SAFE_PROMPT_TOKENS)

    assert tokens() == {A_GPU: 9999.0}
    assert tokens(model_tokens=4096) == {A_GPU: 4096.0}


def test_prompt_logprobs_are_a_prompt_too() -> None:
    works = work(Work.PREFILL, sized(*DOUBLINGS, token_bytes=10 * TOKEN_BYTES)), work(Work.PROMPT_LOGPROBS)
    samples = derived(*works)

    tokens = values(samples, catalog.ENGINE_SAFE_PROMPT_TOKENS)
    assert values(samples, catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS) == tokens
    assert 300 < tokens[A_GPU] < 360


def test_an_image_is_predicted_up_to_four_times_the_largest() -> None:
    pixels = tuple(size * 1000 for size in DOUBLINGS)
    fitting = derived(work(Work.ENCODER, sized(*pixels, token_bytes=300)), free=60 * GIB)

    assert values(fitting, catalog.ENGINE_SAFE_IMAGE_PIXELS) == {A_GPU: 4.0 * pixels[-1]}


def test_a_gpu_of_others_has_no_samples() -> None:
    process = probed(devices=(AllocatorReading(uuid="GPU-b"),), peaks=PeakReadings(works=(work(Work.PREFILL),)))

    assert derive_peaks(snapshot(gpus=(gpu(),), probe=ProbeReadings(present=(process,)))) == ()
    assert derive_peaks(snapshot(gpus=(gpu(),), probe=None)) == ()
