"""Which cause it was: every rule is asked, and the surest finding is the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from vllm_headroom.commands.postmortem.facts import Facts
from vllm_headroom.commands.postmortem.finding import Cause, Finding, Sureness
from vllm_headroom.commands.postmortem.rules.ending import crash, hang, killed, orderly
from vllm_headroom.commands.postmortem.rules.memory import burst, leak, neighbour, never_fitted

RULES: Final[tuple[Callable[[Facts], Finding | None], ...]] = (
    killed,
    never_fitted,
    neighbour,
    leak,
    burst,
    hang,
    orderly,
    crash,
)
"""Of findings that are as sure as each other, the first counts."""

UNKNOWN: Final = Finding(
    cause=Cause.UNKNOWN,
    sureness=Sureness.POSSIBLE,
    sentence="What ended the engine cannot be told from this.",
    evidence=("vLLM's own log has the last word (kubectl logs --previous), and the kernel's (dmesg -T)",),
)
NOTHING: Final = Finding(
    cause=Cause.NOTHING, sureness=Sureness.LIKELY, sentence="No end of an engine is seen here, and no stall."
)


def judge(facts: Facts | None, *, told: bool = False) -> tuple[Finding, ...]:
    """Return what fits, the surest first; there is always one. `told` is whether there was an end all the same.

    Beside one that is sure none is possible.
    """
    if facts is None:
        return (UNKNOWN if told else NOTHING,)
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    if any(finding.sureness is Sureness.SURE for finding in found):
        found = [finding for finding in found if finding.sureness is not Sureness.POSSIBLE]
    return tuple(sorted(found, key=lambda finding: list(Sureness).index(finding.sureness))) or (UNKNOWN,)
