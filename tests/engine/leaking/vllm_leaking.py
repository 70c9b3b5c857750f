"""A plugin that makes the engine core keep 12.8 MB for a thousand requests."""

from __future__ import annotations

import multiprocessing
from typing import Any

kept: list[bytearray] = []


def register() -> None:
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - of the core's process alone

    add_request = Scheduler.add_request

    def leaking(self: Any, request: Any) -> None:
        kept.append(bytearray(12_800))
        add_request(self, request)

    Scheduler.add_request = leaking
