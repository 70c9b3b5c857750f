"""The verdict of a command with its findings, and the JSON object for both."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, to_builtins

SCHEMA: Final = "https://vllm-headroom.github.io/vllm-headroom/schemas/{}-1.json"
"""The schema's name, by the command. Nothing fetches this URL; the files are in the folder schemas.
"""


class Conclusion(StrEnum):
    """Whether the subject of a command is good.

    The set is closed, so that scripts can rely on its members. The order gives the exit statuses.
    """

    GOOD = "good"
    NOT_GOOD = "not_good"
    CANNOT_TELL = "cannot_tell"

    @property
    def status(self) -> int:
        """Return the exit status: 0, 1 or 2."""
        return list(Conclusion).index(self)


def find_worst(verdicts: Iterable[Conclusion]) -> Conclusion:
    """Return the worst verdict; good without verdicts. Not good is worse than cannot tell."""
    worst_first = [Conclusion.NOT_GOOD, Conclusion.CANNOT_TELL, Conclusion.GOOD]
    return min(verdicts, key=worst_first.index, default=Conclusion.GOOD)


class Finding(Struct, frozen=True):
    """One finding; `fix` has the lines that would fix what was found, or is empty."""

    subject: str
    verdict: Conclusion
    text: str
    fix: tuple[str, ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """The result of a command, for people and for scripts."""

    verdict: Conclusion
    headline: str
    findings: Sequence[Finding] = ()

    data: Mapping[str, Any] = {}
    """All figures, for --json; an unknown figure is None."""

    lines: Iterable[str] = ()
    """The report as text."""

    exit_status: int | None = None
    """Replaces the verdict's exit status, for a command that only reports; None keeps the
    verdict's.
    """

    @property
    def status(self) -> int:
        """The exit status."""
        return self.verdict.status if self.exit_status is None else self.exit_status

    def build_envelope(self, command: str) -> dict[str, Any]:
        """Build the object of --json, the same for all commands."""
        return {
            "schema": SCHEMA.format(command),
            "command": command,
            "status": self.status,
            "verdict": self.verdict,
            "headline": self.headline,
            "findings": to_builtins(list(self.findings)),
            "data": self.data,
        }
