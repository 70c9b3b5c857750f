"""The peak memory of steps by kind of work, as the probe measures it."""

from msgspec import Struct

from vllm_headroom.vocabulary import Work


class StepFacts(Struct, frozen=True, kw_only=True):
    """What one step of the engine computed."""

    at_seconds: float
    """When the step began, in seconds since the epoch."""

    requests: int = 0
    tokens: int = 0
    """All tokens in the step, both of prompts and of running requests."""

    prompt_tokens: int = 0
    logprobs_requests: int = 0
    """The number of requests with prompt logprobs."""

    logprobs_tokens: int = 0
    """The number of prompt tokens in the largest request with prompt logprobs."""

    images: int = 0
    pixels: int = 0
    adapters: int = 0
    """The number of adapters loaded by the step."""

    drafts: int = 0
    """The number of drafted tokens verified by the step."""

    def describe(self, work: Work) -> str:
        """Describe in words what a step of this kind of work computed."""
        requests = _count(self.requests, "request")
        if work is Work.PROMPT_LOGPROBS:
            tokens = f"{self.logprobs_tokens:,} prompt tokens"
            return f"{tokens} with prompt logprobs of {_count(self.logprobs_requests, 'request')}"
        if work is Work.ENCODER:
            images = _count(self.images, "image")
            return f"{images} of {self.pixels:,} pixels" if self.pixels else images
        if work is Work.ADAPTER:
            adapters = _count(self.adapters, "adapter")
            return f"{adapters} to load and {self.tokens:,} tokens of {requests}"
        if work is Work.SAMPLING:
            if self.drafts:
                return f"sampling for {requests} and {_count(self.drafts, 'drafted token')}"
            return f"sampling for {requests}"
        if work is Work.PREFILL:
            return f"{self.prompt_tokens:,} prompt tokens in {requests}"
        if self.drafts:
            return f"{self.tokens:,} tokens of {requests}, {self.drafts:,} of them drafted"
        return f"{self.tokens:,} tokens of {requests}"


def _count(number: int, thing: str) -> str:
    """Return a count of things in words, such as "one request" or "3 requests"."""
    return f"one {thing}" if number == 1 else f"{number:,} {thing}s"


class WorkPeak(Struct, frozen=True, kw_only=True):
    """A step's peak memory above the memory at rest, with facts about the step."""

    transient_bytes: int
    size: int
    """The size on which memory use depends: tokens, rows or pixels, by work."""

    step: StepFacts


class SizePeak(Struct, frozen=True, kw_only=True):
    """The highest peak among steps of nearly the same size."""

    size: int
    transient_bytes: int
    steps: int
    """The number of steps of nearly this size."""


class WorkPeaks(Struct, frozen=True, kw_only=True):
    """The peaks of one kind of work since the process started."""

    work: Work
    sizes: tuple[SizePeak, ...] = ()
    highest: WorkPeak | None = None
    recent: WorkPeak | None = None
    """The highest peak in the last minute, or None if no step ran during it."""


class PeakReadings(Struct, frozen=True, kw_only=True):
    """What one process reports about its peaks; a field is None if unknown."""

    works: tuple[WorkPeaks, ...] = ()
    resting_allocated_bytes: int | None = None
    """The bytes that torch had allocated when the newest step began."""

    resting_reserved_bytes: int | None = None
    resting_split_bytes: int | None = None
    """Unused memory that cannot be freed, because another part of its segment is in use."""

    batch_tokens: int | None = None
    """The maximum number of tokens per step: max_num_batched_tokens."""

    model_tokens: int | None = None
    """The maximum number of tokens per request: max_model_len."""

    max_requests: int | None = None
    """The maximum number of requests running at once: max_num_seqs."""

    stopped: str | None = None
    """The error that ended the measurement, or None while it is running."""


class StepAtError(Struct, frozen=True, kw_only=True):
    """The step in which an OutOfMemoryError was raised."""

    work: Work
    step: StepFacts
