"""Determine from the scheduler's output what a step of vLLM's runner computes."""

from __future__ import annotations

from typing import Any, NamedTuple

PREFILL = "prefill"
DECODE = "decode"
ENCODER = "encoder"
ADAPTER = "adapter"
OTHER = "other"

MAX_ADAPTERS = 1024
"""The maximum number of adapters remembered as loaded. If there are more, all are forgotten. The
next step that uses a forgotten adapter is then assumed to load it.
"""

NEXT_LOGPROBS_SHARE = 0.4
"""A share of a request's memory for prompt logprobs. vLLM still holds this share while it computes
the next request's logprobs. Of every ten bytes, the logprobs themselves take four
(_get_prompt_logprobs_dict in vllm/v1/worker/gpu_model_runner.py). The measured share is 0.41.
"""

COLOURS = 3
"""The number of values per pixel in an image's tensor."""

PATCH_FRAMES = (1, 2)
"""The possible numbers of frames in a flattened patch. Video models repeat an image in two frames.
"""


class Step(NamedTuple):
    """The work that one step of the runner computes."""

    kind: str
    """The kind of work in its forward pass."""
    requests: int
    total_tokens: int
    prompt_tokens: int
    logprobs_requests: int
    """The number of requests with prompt logprobs."""
    logprobs_tokens: int
    """The tokens of the largest request with prompt logprobs. vLLM computes these requests one
    after another, so only the largest matters.
    """
    logprobs_size: int
    """`logprobs_tokens` plus a share of the second largest request. vLLM may hold both at the same
    time.
    """
    images: int
    pixels: int
    adapters: int
    """The number of adapters that the step loads."""
    drafts: int
    """The number of drafted tokens that the step verifies."""
    is_repeatable: bool
    """Whether the step only computes the next tokens of its requests. Most steps are of this type.
    The next step is likely to be the same.
    """


NO_STEP = Step(
    kind=OTHER,
    requests=0,
    total_tokens=0,
    prompt_tokens=0,
    logprobs_requests=0,
    logprobs_tokens=0,
    logprobs_size=0,
    images=0,
    pixels=0,
    adapters=0,
    drafts=0,
    is_repeatable=False,
)
"""The step before the first one."""


class Prompt:
    """A request whose prompt is being computed."""

    __slots__ = ("has_logprobs", "tokens")

    def __init__(self, tokens: int | None, *, has_logprobs: bool) -> None:
        self.tokens = tokens
        """The number of tokens not computed yet, or None if unknown, as after a preemption."""
        self.has_logprobs = has_logprobs


class Batch:
    """Follows the scheduler's orders to the runner, to determine what each step computes."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        """The requests whose prompt is being computed, by request ID."""
        self._earlier_ids: set[str] | None = None
        """The requests of the first observed step that are still running. The value is None before
        that step. It is unknown what these requests compute.
        """
        self._pixels: dict[str, list[int]] = {}
        """The number of pixels in each image, by the ID of the request."""
        self._adapters: set[int] = set()
        """The adapters that have been loaded."""

    def follow(self, order: Any) -> Step:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return what a scheduled step computes.

        Callers may leave out a step that is like the last one.
        """
        scheduled_tokens: dict[str, int] = order.num_scheduled_tokens
        for request_id in order.finished_req_ids:
            self._prompts.pop(request_id, None)
            self._pixels.pop(request_id, None)
        adapters = 0
        new_ids = []
        for request in order.scheduled_new_reqs:
            new_ids.append(request.req_id)
            adapters += self._admit(request)
        self._admit_resumed(order)
        is_mixed = self._follow_earlier(scheduled_tokens, new_ids, order.finished_req_ids)

        prompt_tokens = 0
        logprobs_requests = 0
        logprobs_tokens = 0
        second_tokens = 0
        for request_id, prompt in list(self._prompts.items()):
            tokens = scheduled_tokens.get(request_id, 0)
            if self._advance(request_id, prompt, tokens, order):
                prompt_tokens += tokens
                if prompt.has_logprobs and tokens:
                    logprobs_requests += 1
                    second_tokens = max(second_tokens, min(logprobs_tokens, tokens))
                    logprobs_tokens = max(logprobs_tokens, tokens)

        images = 0
        pixels = 0
        for request_id, indices in order.scheduled_encoder_inputs.items():
            images += len(indices)
            image_pixels = self._pixels.get(request_id, [])
            pixels += sum(image_pixels[index] for index in indices if index < len(image_pixels))
        if images:
            kind = ENCODER
        elif adapters:
            kind = ADAPTER
        elif is_mixed or not order.total_num_scheduled_tokens:
            kind = OTHER
        else:
            kind = PREFILL if prompt_tokens else DECODE
        drafts = order.scheduled_spec_decode_tokens
        has_more = prompt_tokens or images or adapters or self._prompts
        return Step(
            kind=kind,
            requests=len(scheduled_tokens),
            total_tokens=order.total_num_scheduled_tokens,
            prompt_tokens=prompt_tokens,
            logprobs_requests=logprobs_requests,
            logprobs_tokens=logprobs_tokens,
            logprobs_size=logprobs_tokens + round(NEXT_LOGPROBS_SHARE * second_tokens),
            images=images,
            pixels=pixels,
            adapters=adapters,
            drafts=sum(map(len, drafts.values())) if drafts else 0,
            is_repeatable=bool(order.total_num_scheduled_tokens) and not has_more,
        )

    def _admit(self, request: Any) -> int:  # noqa: ANN401 - vLLM's NewRequestData
        """Start following a request; return how many adapters it loads: 0 or 1."""
        prompt = request.prompt_token_ids
        if prompt is None:
            prompt = getattr(request, "prompt_embeds", None)
        prompt_tokens = None if prompt is None else len(prompt) - request.num_computed_tokens
        parameters = request.sampling_params
        has_logprobs = getattr(parameters, "prompt_logprobs", None) is not None
        self._prompts[request.req_id] = Prompt(prompt_tokens, has_logprobs=has_logprobs)
        features = getattr(request, "mm_features", None)
        if features:
            self._pixels[request.req_id] = [count_pixels(feature) for feature in features]
        if request.lora_request is None:
            return 0
        adapter = request.lora_request.lora_int_id
        if adapter in self._adapters:
            return 0
        if len(self._adapters) >= MAX_ADAPTERS:
            self._adapters.clear()
        self._adapters.add(adapter)
        return 1

    def _admit_resumed(self, order: Any) -> None:  # noqa: ANN401
        """Follow resumed requests from the start, because a preemption has reset them."""
        resumed_ids = getattr(order.scheduled_cached_reqs, "resumed_req_ids", ())
        for request_id in resumed_ids:
            self._prompts[request_id] = Prompt(None, has_logprobs=False)

    def _follow_earlier(
        self, scheduled_tokens: dict[str, int], new_ids: list[str], finished_ids: set[str]
    ) -> bool:
        """Return whether the step contains a request that began before the first observed step."""
        if self._earlier_ids is None:
            self._earlier_ids = set(scheduled_tokens).difference(new_ids)
        if self._earlier_ids:
            self._earlier_ids.difference_update(finished_ids)
        return bool(self._earlier_ids)

    def _advance(self, request_id: str, prompt: Prompt, tokens: int, order: Any) -> bool:  # noqa: ANN401
        """Count a request's tokens in this step; return whether they belong to its prompt."""
        if prompt.tokens is None:
            # A decoding request has one token, plus its drafted tokens. If a request has more
            # tokens, its prompt is being recomputed.
            is_prompt = tokens > 1 and request_id not in order.scheduled_spec_decode_tokens
            if tokens and not is_prompt:
                del self._prompts[request_id]
            return is_prompt
        prompt.tokens -= tokens
        if prompt.tokens <= 0:
            del self._prompts[request_id]
        return True


def count_pixels(feature: Any) -> int:  # noqa: ANN401 - vLLM's MultiModalFeatureSpec
    """Return how many pixels the encoder computes for one image, or 0 if unknown."""
    data = getattr(feature, "data", None)
    if data is None or "pixel_values" not in data:
        return 0
    shape = tuple(data["pixel_values"].data.shape)
    values = 1
    for length in shape:
        values *= length
    if "image_grid_thw" in data and len(shape) > 1:
        # Each row is a flattened patch, a square of pixels in three colours.
        for frames in PATCH_FRAMES:
            patch_pixels, remainder = divmod(shape[-1], COLOURS * frames)
            side = round(patch_pixels**0.5)
            if not remainder and side * side == patch_pixels:
                return values // (COLOURS * frames)
    return values // COLOURS
