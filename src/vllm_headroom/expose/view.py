"""What the page and the snapshot show: one moment of the daemon."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.expose.history import History
from vllm_headroom.model import Snapshot, Values, Verdict
from vllm_headroom.vocabulary import Level

NO_SAMPLE: Final = Verdict(subject="sidecar", level=Level.UNKNOWN, sentence="No sample has been published yet.")


class Incident(Struct, frozen=True, kw_only=True):
    """An incident that was set aside, in seconds since the epoch: `what` is ended or stalled, `file` where it lies."""

    seconds: float
    what: str
    reason: str | None
    file: str

    @property
    def command(self) -> str:
        """What tells more of it, where the file is."""
        return f"vllm-headroom postmortem {self.file}"


class View(Struct, frozen=True, kw_only=True):
    """The last sample and its values with what is said of them, none before there was one; `age_seconds` is its age.

    `unwell` is why the sampling loop does not turn, `notice` what else people must know, `runbooks` where they are.
    """

    version: str
    interval_seconds: float
    history: History
    snapshot: Snapshot | None = None
    values: Values = Values(())
    verdicts: tuple[Verdict, ...] = ()
    age_seconds: float = 0.0
    unwell: str | None = None
    notice: str = ""
    runbooks: str | None = None
    last_incident: Incident | None = None

    @property
    def said(self) -> tuple[Verdict, ...]:
        """What is to be said at this moment: of what was seen before the loop stopped nothing is known now."""
        verdicts = self.verdicts if self.snapshot is not None else (NO_SAMPLE,)
        if self.unwell is None:
            return verdicts
        text = f"The sidecar does not sample: {self.unwell}; what stands below is old."
        stopped = Verdict(subject="sidecar", level=Level.ALARM, sentence=text, alert="HeadroomSampleStale")
        return (stopped, *(replace(each, level=Level.UNKNOWN) for each in verdicts))

    def runbook(self, alert: str | None) -> str | None:
        """Return where the runbook of an alert is; None where that is not known."""
        if alert is None or self.runbooks is None:
            return None
        return self.runbooks.replace("{alert}", alert) if "{alert}" in self.runbooks else f"{self.runbooks}/{alert}"
