"""Rules on what is no want of GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.postmortem.facts import Circumstances
from vllm_headroom.commands.postmortem.finding import Diagnosis, EndCause, Sureness
from vllm_headroom.commands.postmortem.rules.memory import FEW_BYTES, left
from vllm_headroom.trace.incidents import What
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import ExitReason

FATAL_XIDS: Final = frozenset({13, 31, 48, 62, 74, 79, 94, 95, 119, 120})
"""Errors that end the program, by NVIDIA's table; 43 and 45 also follow from its end, 63 and 64 need not end it."""

UNSEEN_SECONDS: Final = 15.0
"""Memory is filled within seconds: who was not looked at for longer may have run out of it."""

SHUT_SECONDS: Final = 15.0
"""A server whose core has died ends within seconds, and refuses its page meanwhile."""

ANSWERED: Final = "its page went on to answer; in vLLM's development mode one that was paused looks the same"


def killed(facts: Circumstances) -> Diagnosis | None:
    """Fit where the kernel counted a kill in the engine's container as this life ended."""
    if facts.reason is not ExitReason.OOM_KILLED:
        return None
    return Diagnosis(
        cause=EndCause.KILLED,
        sureness=Sureness.SURE,
        sentence="Killed by the kernel: the host's memory, not the GPU's, had run out.",
        evidence=("the kernel counted a kill for want of memory in the engine's container then", ran(facts)),
    )


def hang(facts: Circumstances) -> Diagnosis | None:
    """Fit where nothing moved though there was work; surely where its page went on to say so."""
    if facts.hung_seconds is None or not facts.served or _is_told_to_end(facts):
        return None
    page = ANSWERED if facts.answered else "its page did not answer, and its processes lived"
    return Diagnosis(
        cause=EndCause.HANG,
        sureness=Sureness.SURE if facts.answered and facts.running else Sureness.LIKELY,
        sentence=f"A hang: the engine had work and nothing moved for {duration(facts.hung_seconds)}.",
        evidence=(*facts.lost, ran(facts), page),
    )


def crash(facts: Circumstances) -> Diagnosis | None:
    """Fit where the engine ended at work, or in pieces, with memory left; surely only with an XID."""
    stalled = facts.what is What.STALLED and not facts.broken
    if (
        facts.full is not None
        or facts.ooms
        or stalled
        or (facts.hung_seconds is not None and not (facts.xids or facts.lost))
    ):
        return None
    fatal = FATAL_XIDS & set(facts.xids)
    room = None if facts.worst is None else facts.worst.last_room_bytes
    seen = facts.unseen_seconds is not None and facts.unseen_seconds <= UNSEEN_SECONDS
    at_ease = seen and room is not None and room >= FEW_BYTES
    likely = bool(facts.lost) or (facts.served and at_ease and (facts.broken or bool(facts.running)))
    whole = "A crash" if facts.served else "A start that failed"
    rest = " with GPU memory at ease: look elsewhere." if at_ease else ", and not known to be for want of GPU memory."
    return Diagnosis(
        cause=EndCause.CRASH,
        sureness=Sureness.SURE if fatal else Sureness.LIKELY if likely else Sureness.POSSIBLE,
        sentence=f"{whole}: a GPU of it could not be read any more." if facts.lost else whole + rest,
        evidence=tuple(_crashed(facts)),
    )


def stopped(facts: Circumstances) -> Diagnosis | None:
    """Fit where the server closed its port, let its core go and lived on."""
    if not _is_told_to_end(facts):
        return None
    return Diagnosis(
        cause=EndCause.STOPPED,
        sureness=Sureness.LIKELY,
        sentence="An end that was asked for: the server closed its port, let its core go and waited.",
        evidence=(ran(facts), "vLLM that is told to end cuts off what runs and waits until its clients hang up"),
    )


def idle(facts: Circumstances) -> Diagnosis | None:
    """Fit where the engine had nothing to do when it ended, whole and with memory left; who ended it is not seen."""
    if facts.what is not What.ENDED or not facts.served or facts.idle_seconds is None or facts.broken:
        return None
    if facts.full is not None or facts.hung_seconds is not None or facts.lost or FATAL_XIDS & set(facts.xids):
        return None
    gpu = facts.worst
    return Diagnosis(
        cause=EndCause.IDLE,
        sureness=Sureness.LIKELY if (facts.unseen_seconds or 0.0) <= UNSEEN_SECONDS else Sureness.POSSIBLE,
        sentence="Ended while idle: it was stopped or killed, or crashed, which look the same from here.",
        evidence=(
            f"nothing had run or waited for {duration(facts.idle_seconds)} when its page was last seen",
            *(() if gpu is None else (left(gpu),)),
        ),
    )


def _is_told_to_end(facts: Circumstances) -> bool:
    return facts.served and facts.shut_seconds is not None and facts.shut_seconds >= SHUT_SECONDS


def _crashed(facts: Circumstances) -> Iterator[str]:
    yield from facts.lost
    for xid in facts.xids:
        yield f"the driver reported XID {xid}"
    if facts.broken:
        yield "a process that it cannot serve without went before the others"
    yield ran(facts)
    if facts.worst is not None:
        yield left(facts.worst)
    if not facts.xids and not facts.broken and facts.running:
        yield "a restart that was meant, in the midst of requests, looks the same"


def ran(facts: Circumstances) -> str:
    """Return what the engine did when its page was last seen."""
    if facts.running is None:
        return "what it did then is not known" if facts.served else "its page had not answered yet"
    return f"{facts.running:.0f} requests ran when its page was last seen" if facts.running else "no request ran"
