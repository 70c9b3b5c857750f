"""Use `plan` to estimate whether a start would succeed with other options."""

import json
from typing import Any, Final

from vllm_headroom_tools.advise.log.facts import StartFacts
from vllm_headroom_tools.sizing.checks import can_start
from vllm_headroom_tools.sizing.estimate import estimate_memory
from vllm_headroom_tools.sizing.model_config import parse_model_config
from vllm_headroom_tools.sizing.public_models import find_public_model
from vllm_headroom_tools.sizing.question import Question, choose_defaults, find_problem
from vllm_headroom_tools.sizing.releases import NEWEST_RELEASE, Release, parse_release


def would_start(start_facts: StartFacts, **changes: Any) -> bool | None:  # noqa: ANN401 - options
    """Return whether vLLM would start with these options instead of those in the log.

    Returns None if `plan` does not know the model or the card. Also returns None if its estimate is
    too close to the limit.
    """
    model = start_facts.start.model
    total_bytes = start_facts.total_bytes
    if model is None or total_bytes is None:
        return None
    config = find_public_model(model)
    if isinstance(config, str):
        return None
    shape = parse_model_config(json.dumps(config))
    if isinstance(shape, str):
        return None
    settings = start_facts.settings
    release = _find_release(start_facts)
    gpu_memory_bytes = round(total_bytes)
    # If the log lacks a figure, vLLM's default is used. The default depends on the card and the
    # version.
    defaults = choose_defaults(gpu_memory_bytes, release)
    options: dict[str, Any] = {
        "shape": shape,
        "release": release,
        "gpu_memory_bytes": gpu_memory_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization or release.utilization,
        "tensor_parallel_size": start_facts.tensor_parallel_size,
        "max_model_len": settings.max_model_len or shape.max_model_len,
        "max_num_seqs": settings.max_num_seqs or defaults.max_num_seqs,
        "max_num_batched_tokens": (
            settings.max_num_batched_tokens or defaults.max_num_batched_tokens
        ),
    }
    question = Question(**(options | changes))
    if find_problem(question) is not None:
        return None
    return can_start(estimate_memory(question))


def _find_release(start_facts: StartFacts) -> Release:
    """Return vLLM's release from the log, or else the newest known release."""
    try:
        return parse_release(start_facts.start.version or "")
    except ValueError:
        return NEWEST_RELEASE


MOST_GPUS: Final = 8
"""The largest number of GPUs per machine that is tried."""


def find_enough_gpus(start_facts: StartFacts) -> int | None:
    """Return how many GPUs vLLM needs to start.

    The current number is doubled until vLLM fits. `plan` makes the estimate. Returns None if `plan`
    predicts no successful start for any number of GPUs.
    """
    gpus = 2 * start_facts.tensor_parallel_size
    while gpus <= MOST_GPUS:
        if would_start(start_facts, tensor_parallel_size=gpus):
            return gpus
        gpus *= 2
    return None
