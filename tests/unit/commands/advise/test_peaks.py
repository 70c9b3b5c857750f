"""Options from the peaks that the probe measures: each kind of work has its limit, with a value."""

from __future__ import annotations

import pytest

from tests.unit.commands.advise.pages import MIB, Lines, healthy, of_gpu, text
from vllm_headroom import catalog
from vllm_headroom_tools.advise.command import write_advice
from vllm_headroom_tools.advise.finding import Advice, Cause
from vllm_headroom_tools.advise.page import parse_facts
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import judge_facts

SETTINGS = EngineArgs(max_num_batched_tokens=8192, max_num_seqs=256)


def probed(work: str = "prefill", *, peak_mib: int, room_mib: int = 4000, **safe: int) -> Lines:
    sizes: Lines = {
        of_gpu(metric): safe[metric.name.removeprefix("headroom_engine_safe_")]
        for metric in (
            catalog.ENGINE_SAFE_PROMPT_TOKENS,
            catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS,
            catalog.ENGINE_SAFE_IMAGE_PIXELS,
        )
        if metric.name.removeprefix("headroom_engine_safe_") in safe
    }
    return (
        healthy()
        | sizes
        | {
            of_gpu(catalog.ENGINE_PEAK_ROOM): room_mib * MIB,
            of_gpu(catalog.ENGINE_PEAK, work=work): peak_mib * MIB,
            of_gpu(catalog.ENGINE_PEAK_SPREAD, work=work): 100 * MIB,
        }
    )


def advise(lines: Lines) -> list[Advice]:
    all_advice = judge_facts(parse_facts(text(lines), SETTINGS)).advice
    return [advice for advice in all_advice if advice.cause is Cause.PEAK]


def test_peaks_that_fit_need_no_advice() -> None:
    assert advise(probed(peak_mib=3900)) == []
    assert advise(probed(peak_mib=10, prompt_tokens=9000, prompt_logprobs_tokens=9000)) == []


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        ("prefill", (Flag.MAX_NUM_BATCHED_TOKENS, 6000)),
        ("prompt_logprobs", (Flag.MAX_NUM_BATCHED_TOKENS, 2000)),
        ("adapter", (Flag.MAX_NUM_BATCHED_TOKENS, 6000)),
        ("encoder", (Flag.MM_PROCESSOR_KWARGS, 1_000_000)),
        ("decode", (Flag.MAX_NUM_SEQS, 227)),
        ("sampling", (Flag.MAX_NUM_SEQS, 227)),
    ],
)
def test_a_peak_that_does_not_fit_again_is_limited_by_its_kind(work: str, limit: tuple[Flag, float]) -> None:
    safe = {"prompt_tokens": 6000, "prompt_logprobs_tokens": 2000, "image_pixels": 1_000_000}
    (advice,) = advise(probed(work, peak_mib=4400, **safe))

    assert (advice.changes[0].flag, advice.changes[0].value) == limit
    assert advice.changes[-1].flag is Flag.GPU_MEMORY_UTILIZATION
    assert f"the kind {work}" in advice.summary


def test_prompt_logprobs_are_limited_before_they_end_the_engine() -> None:
    (advice,) = advise(probed(peak_mib=10, prompt_tokens=16_384, prompt_logprobs_tokens=3165))

    assert [(change.flag, change.value) for change in advice.changes] == [
        (Flag.MAX_NUM_BATCHED_TOKENS, 3165),
        (Flag.MAX_LOGPROBS, 0),
    ]


def test_images_are_limited_as_vllm_takes_it() -> None:
    (sized,) = advise(probed("encoder", peak_mib=4400, image_pixels=1_000_000))
    (unknown,) = advise(probed("encoder", peak_mib=4400))

    pixels, images = map(write_advice, sized.changes[:2])
    assert pixels.startswith("--mm-processor-kwargs '{\"max_pixels\": 1000000}': images have no more pixels")
    assert images == "--limit-mm-per-prompt '{\"image\": 1}': a request brings one image"
    assert unknown.changes[0].flag is Flag.LIMIT_MM_PER_PROMPT
