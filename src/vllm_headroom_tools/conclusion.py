"""A command's verdict and findings, and the JSON object that contains both."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, to_builtins

SCHEMA: Final = "https://vllm-headroom.github.io/vllm-headroom/schemas/{}-1.json"
"""The name of a report's JSON schema, with a placeholder for the command. Nothing fetches this URL;
the schemas are in the folder `schemas`.
"""


class Conclusion(StrEnum):
    """The verdict of a command on its subject.

    No member will be added, so scripts can rely on the set. A member's position is its exit status.
    """

    GOOD = "good"
    NOT_GOOD = "not_good"
    CANNOT_TELL = "cannot_tell"

    @property
    def status(self) -> int:
        """Return the exit status: 0, 1 or 2."""
        return list(Conclusion).index(self)


def find_worst(verdicts: Iterable[Conclusion]) -> Conclusion:
    """Return the worst verdict, or "good" if there are no verdicts.

    "not good" is the worst.
    """
    worst_first = [Conclusion.NOT_GOOD, Conclusion.CANNOT_TELL, Conclusion.GOOD]
    return min(verdicts, key=worst_first.index, default=Conclusion.GOOD)


class Finding(Struct, frozen=True):
    """One finding.

    `fix` contains the lines that would fix the problem, and may be empty.
    """

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
    """The exit status of a command that only reports. It replaces the exit status of the verdict.
    None means that the verdict determines the exit status.
    """

    @property
    def status(self) -> int:
        """The exit status."""
        return self.verdict.status if self.exit_status is None else self.exit_status

    def build_envelope(self, command: str) -> dict[str, Any]:
        """Build the object that --json prints; its form is the same for all commands."""
        return {
            "schema": SCHEMA.format(command),
            "command": command,
            "status": self.status,
            "verdict": self.verdict,
            "headline": self.headline,
            "findings": to_builtins(list(self.findings)),
            "data": self.data,
        }
