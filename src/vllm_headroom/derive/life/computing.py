"""When did the server behind the page last compute?"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.page_facts import together
from vllm_headroom.model import EngineProcess
from vllm_headroom.vocabulary import Role

ENOUGH_SECONDS: Final = 1.0
"""CPU time by which a server shows that it runs. One that is stopped, or waits for what never comes, takes next to
none. One of many that want the same cores gets its share: ten seconds a minute of two cores at a load of 42."""


class Computing(Struct, frozen=True, kw_only=True):
    """The CPU time of all API servers together when they had last taken enough of it, and when that was."""

    cpu_seconds: float
    at_seconds: float


def computed(before: Computing | None, processes: tuple[EngineProcess, ...] | None, now: float) -> Computing | None:
    """Return when the API servers last took enough CPU time; None while that has never been seen.

    Only they speak for a page that is silent: the core and its workers spin while they wait for a GPU that never
    answers (NCCL does), but then the page answers, and says that nothing moves.
    """
    taken = together(each.cpu_seconds for each in processes or () if each.role is Role.API_SERVER)
    if taken is None:
        return before
    if before is None or taken >= before.cpu_seconds + ENOUGH_SECONDS:
        return Computing(cpu_seconds=taken, at_seconds=now)
    return replace(before, cpu_seconds=min(before.cpu_seconds, taken))  # less: one of several has ended
