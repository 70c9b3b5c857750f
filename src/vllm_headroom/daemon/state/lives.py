"""The lives of the engine over restarts of the daemon: how many came and went, and which was the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_headroom.daemon.state.file import File
from vllm_headroom.derive.life.lives import Lives

FORMAT: Final = 1
"""To be raised when the fields of a life, or what they mean, change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLives:
    """The lives as they were when they were saved; whether the newest one goes on is seen at the next look."""

    format: int = FORMAT
    lives: Lives


LIVES: Final = File("lives.json", KeptLives, FORMAT)
"""Apart from what the leak detector learned, which is of one life: this goes on when that is set aside."""
