"""Advice on the memory peaks that the probe measures for each kind of work."""

from math import floor

from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import Work
from vllm_headroom_tools.advise.facts import Facts, GpuFacts, PeakFacts
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    drop_none,
    list_evidence,
    lower_option,
)
from vllm_headroom_tools.advise.rules.capacity import take_less
from vllm_headroom_tools.advise.settings import Flag

REMARK = (
    "The peaks are of single steps, by the probe. Where a leak or a"
    " neighbour took the room, the advice on that comes first."
)


def find_unsafe_peaks(facts: Facts) -> Advice | None:
    """Judge the last minute's peaks and the largest safe requests.

    The probe measures both. The rule applies if the next peak of the same kind might not fit. The
    estimate includes how much such peaks vary. The rule also applies if fewer tokens are safe with
    prompt logprobs than without. The first proposal is a limit on the kind of work that causes the
    peak. The limit is computed from the probe's fit. The second proposal is a smaller share for
    vLLM. Returns None if the rule does not apply.
    """
    for gpu in facts.gpus:
        unfitting = [peak for peak in gpu.peaks if peak.missing_bytes(gpu.peak_room_bytes) > 0]
        if unfitting:
            worst = max(unfitting, key=lambda peak: peak.missing_bytes(gpu.peak_room_bytes))
            return _build_advice(facts, gpu, worst)
    for gpu in facts.gpus:
        if _are_logprobs_limited(gpu):
            return _build_advice(facts, gpu, None)
    return None


def _are_logprobs_limited(gpu: GpuFacts) -> bool:
    """Return whether memory limits prompts with logprobs more than the cache or model does."""
    if gpu.safe_prompt_tokens is None or gpu.safe_logprobs_tokens is None:
        return False
    return gpu.safe_logprobs_tokens < gpu.safe_prompt_tokens


def _build_advice(facts: Facts, gpu: GpuFacts, peak: PeakFacts | None) -> Advice:
    """Return advice on a peak that does not fit.

    If `peak` is None, the advice is on prompt logprobs.
    """
    if peak is None:
        work = Work.PROMPT_LOGPROBS
        missing_bytes = None
        summary = f"A long prompt with prompt logprobs would fill {gpu.display_name}."
    else:
        work = peak.work
        missing_bytes = peak.missing_bytes(gpu.peak_room_bytes)
        summary = f"A step like the largest of the kind {work} does not fit on {gpu.display_name}."
    changes = list(_limit_work(facts, gpu, work, peak))
    if missing_bytes is not None:
        changes += drop_none(take_less(facts, gpu, missing_bytes))
    return Advice(
        cause=Cause.PEAK,
        summary=summary,
        evidence=list_evidence(
            ("peak_bytes", None if peak is None else peak.transient_bytes, f"{work}: up to {{}}"),
            ("peak_room_bytes", gpu.peak_room_bytes, "{} are free for a step"),
            ("safe_prompt_tokens", gpu.safe_prompt_tokens, "prompts are safe up to {} tokens"),
            (
                "safe_prompt_logprobs_tokens",
                gpu.safe_logprobs_tokens,
                "with prompt logprobs up to {} tokens",
            ),
        ),
        changes=tuple(changes),
        remark=REMARK,
    )


def _limit_work(
    facts: Facts, gpu: GpuFacts, work: Work, peak: PeakFacts | None
) -> tuple[Change, ...]:
    """Return the options that limit a kind of work.

    The values of the limits are computed from the probe's fit.
    """
    if work is Work.PROMPT_LOGPROBS and gpu.safe_logprobs_tokens:
        return drop_none(
            lower_option(
                facts,
                Flag.MAX_NUM_BATCHED_TOKENS,
                gpu.safe_logprobs_tokens,
                "a step computes the logprobs of no more prompt tokens than fit",
                "long prompts take more steps; a restart",
            ),
            Change(
                flag=Flag.MAX_LOGPROBS,
                value=0,
                text="refuses logprobs of alternative tokens, but not prompt_logprobs of 0",
                cost="refuses them to everyone; a restart",
            ),
        )
    if work in {Work.PREFILL, Work.ADAPTER} and gpu.safe_prompt_tokens:
        text = "a step computes no more prompt tokens than fit"
        cost = "long prompts take more steps; a restart"
        return drop_none(
            lower_option(facts, Flag.MAX_NUM_BATCHED_TOKENS, gpu.safe_prompt_tokens, text, cost)
        )
    if work is Work.ENCODER:
        return _limit_images(gpu)
    if work in {Work.DECODE, Work.SAMPLING} and peak is not None and gpu.peak_room_bytes:
        share = gpu.peak_room_bytes / (peak.transient_bytes + peak.spread_bytes)
        requests = floor(share * (facts.settings.max_num_seqs or 0))
        text = f"leaves {format_size(gpu.peak_room_bytes)} enough for a step of all requests"
        cost = "requests wait in the queue; a restart"
        return drop_none(lower_option(facts, Flag.MAX_NUM_SEQS, requests, text, cost))
    return ()


def _limit_images(gpu: GpuFacts) -> tuple[Change, ...]:
    """Return the limit on images.

    If a safe number of pixels is known, a limit on pixels comes first.
    """
    one_image = Change(
        flag=Flag.LIMIT_MM_PER_PROMPT,
        value=1,
        text="a request brings one image",
        cost="refuses requests with more images; a restart",
    )
    if not gpu.safe_image_pixels:
        return (one_image,)
    smaller_images = Change(
        flag=Flag.MM_PROCESSOR_KWARGS,
        value=floor(gpu.safe_image_pixels),
        text="images have no more pixels than fit; that is the name for Qwen-VL models",
        cost="larger images lose detail; a restart",
    )
    return (smaller_images, one_image)
