"""The inner parts of the daemon, as the settings want them."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.derive import derivations
from vllm_headroom.derive.gates.gates import gates
from vllm_headroom.derive.gates.rules import Rules
from vllm_headroom.model import Snapshot
from vllm_headroom.parse.page import parse_engines
from vllm_headroom.sizing.footprint import token_bytes

LONGEST_TICK_SECONDS: Final = 30.0
"""Between two ticks, whatever hangs meanwhile: each source has seconds. Beyond it the daemon was stopped or starved."""

Recall = Callable[[Snapshot], Awaitable[Mapping[str, Any]]]
"""Returns states that an earlier process kept, by derivation."""


def sampler_of(parts: Parts, settings: PlainSettings, recall: Recall | None, canary: Canary | None) -> Sampler:
    """Return the straight line from the sources to what is published."""
    return Sampler(
        sources=parts,
        parse=partial(parse_engines, profile=settings.profile),
        selection=settings.selection,
        derivations=derivations(
            reported_bytes=settings.reported_bytes,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            model=token_bytes(settings.model_shape),
            baseline_bytes_per_request=settings.baseline_bytes_per_request,
        ),
        clock=parts.clock,
        gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, settings.sample_interval_seconds),
        recall=recall,
        judge=partial(gates, _gate_rules(settings)),
        canary=canary,
        host_limit_bytes=settings.host_memory_limit_bytes,
    )


def _gate_rules(settings: PlainSettings) -> Rules:
    return Rules(
        ready_seconds=settings.gate_ready_seconds,
        ready_most_seconds=settings.gate_ready_most_seconds,
        live_seconds=settings.gate_live_seconds,
        name=settings.gate_name or socket.gethostname(),
    )


def canary_of(parts: Parts, settings: PlainSettings) -> Canary | None:
    """Return what asks an idle engine for a token; None where it is not wanted, or nobody can be asked."""
    if parts.asked is None or settings.canary_interval_seconds is None:
        return None
    most = max(LONGEST_TICK_SECONDS, 3 * settings.sample_interval_seconds)
    return Canary(parts.asked.ask, settings.canary_interval_seconds, parts.clock, most_pause_seconds=most)
