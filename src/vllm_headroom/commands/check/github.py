"""Judgements as annotations, which a GitHub workflow shows beside its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from vllm_headroom.commands.check.judgement import Judgement, Outcome, overall
from vllm_headroom.commands.check.junit import message
from vllm_headroom.commands.check.text import told

LEVELS: Final = {Outcome.FAILED: "error", Outcome.CANNOT_TELL: "warning"}
TITLE: Final = "vllm-headroom check"


def commands(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield an error for each limit that is exceeded, a warning for each that cannot be judged, else one notice.

    GitHub shows ten of a kind and step, so what is kept has one together.
    """
    for judgement in judgements:
        if level := LEVELS.get(judgement.outcome):
            why = f" ({judgement.why})" if judgement.why else ""
            yield _annotation(level, f"{message(judgement)}{why}")
    if overall(judgements) is Outcome.PASSED:
        yield _annotation("notice", told(Outcome.PASSED, judgements))


def _annotation(level: str, text: str) -> str:
    """Return a workflow command; its text is escaped as GitHub's own toolkit does (actions/toolkit, command.ts)."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={TITLE}::{escaped}"
