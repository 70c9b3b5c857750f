"""What an operator can set of the smoke test, and its help."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator

from vllm_headroom.config.fields import setting
from vllm_headroom.config.settings import Settings
from vllm_headroom.units import duration_seconds, share

USED: Final = frozenset({"gpus", "reported_bytes"})


def _seconds(value: object) -> object:
    return duration_seconds(value) if isinstance(value, str) else value


def _share(value: object) -> object:
    return share(value) if isinstance(value, str) else value


def _duration(default: float, shown: str, description: str) -> float:
    """Declare a duration of at most a day."""
    field: float = setting(
        default,
        description,
        accepts="a duration above 0, at most a day, such as 90s or 15m",
        word="DURATION",
        shown=shown,
        gt=0,
        le=86400,
    )
    return field


class SmokeSettings(Settings):
    """The daemon's settings for how to reach the engine and its GPUs, and the smoke test's own."""

    no_options: ClassVar = frozenset(
        name for name in Settings.model_fields if not name.startswith("engine_") and name not in USED
    )

    deadline: Annotated[float, BeforeValidator(_seconds)] = _duration(
        900, "15m", "How long vLLM may take until it is healthy; a large model loads for minutes."
    )
    completion_deadline: Annotated[float, BeforeValidator(_seconds)] = _duration(
        120, "2m", "How long the one completion may take; the first compiles kernels."
    )
    max_discrepancy: Annotated[float, BeforeValidator(_share)] = setting(
        0.05,
        "How much more GPU memory vLLM may hold than it was told to use.",
        accepts="a share such as 5% or 0.05, at most 100%",
        word="SHARE",
        shown="5%",
        ge=0,
        le=1,
    )
