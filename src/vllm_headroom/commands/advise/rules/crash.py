"""A rule on engines that end while they serve, with memory left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.advise.facts import Ending, Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, count
from vllm_headroom.commands.advise.limits import FAILED_STARTS
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.units import instant, size

REMARK: Final = (
    "No option that sizes GPU memory has a part in it. Restarts that were meant, in the midst of requests, look the"
    " same where nothing was left behind."
)


def crash(facts: Facts) -> Advice | None:
    """Fit where an engine left processes behind, or ended FAILED_STARTS times and more while requests ran."""
    found = sudden(facts)
    if len(found) < FAILED_STARTS and not any(ending.orphan_bytes for ending in found):
        return None
    look = (
        f"Read vLLM's log up to {instant(found[-1].seconds)} (kubectl logs --previous), and the kernel's log for an Xid"
        " or a kill for want of host memory"
    )
    return Advice(
        cause=Cause.CRASH,
        summary="The engine crashed, and not for want of GPU memory.",
        evidence=tuple(_evidence(found)),
        changes=(Change(text=look, cost="none to this engine"),),
        remark=REMARK,
    )


def sudden(facts: Facts) -> tuple[Ending, ...]:
    """Return the ends while requests ran or that left processes behind, with LOW_BYTES or more left."""
    return tuple(
        ending
        for ending in facts.endings
        if (ending.running or ending.orphan_bytes) and (ending.room_bytes is None or ending.room_bytes >= LOW_BYTES)
    )


def _evidence(found: tuple[Ending, ...]) -> Iterator[Evidence]:
    last = found[-1]
    times = "once," if len(found) == 1 else f"{len(found)} times, the last"
    yield Evidence("crashes", len(found), f"it ended {times} at {instant(last.seconds)}")
    if last.running is not None:
        yield Evidence("running", last.running, f"{count(last.running)} requests ran just before")
    if last.room_bytes is not None:
        left = f"{size(last.room_bytes)} were left then"
        yield Evidence("room_bytes", last.room_bytes, left)
    orphans = max(ending.orphan_bytes for ending in found)
    if orphans:
        text = f"processes that it left behind went on to hold {size(orphans)}: not another's"
        yield Evidence("orphan_bytes", orphans, text)
