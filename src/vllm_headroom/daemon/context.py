"""What is known at a tick, and was shortly before it, beyond the lines of a trace: the context of an incident."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from vllm_headroom import catalog
from vllm_headroom.model import Failure, ProbedProcess, Snapshot, Values, Verdict

MOST_HOLDERS: Final = 64
FIGURES: Final = (
    catalog.LEAK_RATE,
    catalog.LEAK_PER_REQUEST,
    catalog.LEAKED,
    catalog.TIME_TO_OOM,
)
"""What the leak detector says of a GPU besides its state."""


def context(snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values) -> dict[str, Any]:
    """Return what a later reader cannot tell from the samples alone."""
    parts = (snapshot.engines, snapshot.gpus, snapshot.processes)
    holders = [
        {"uuid": gpu.reading.uuid, "pid": each.pid, "used": each.used_bytes}
        for gpu in snapshot.owned
        for each in gpu.reading.processes or ()
    ]
    return {
        "t": round(snapshot.time_seconds, 3),
        "verdicts": [asdict(each) for each in verdicts],
        "leaks": [_leak(values, str(gpu.reading.index), gpu.reading.uuid) for gpu in snapshot.owned],
        "holders": holders[:MOST_HOLDERS],
        "probe": [_json_of(process) for process in _probed(snapshot)[:MOST_HOLDERS]],
        "problems": [each.message for each in parts if isinstance(each, Failure)],
    }


def ooms(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the newest OutOfMemoryError of each process that the probe tells of, also of those that have ended."""
    return [
        {
            "t": round(each.oom.at_seconds, 3),
            "uuid": each.oom.uuid,
            "asked": each.oom.asked_bytes,
            "free": each.oom.free_bytes,
            "allocated": each.oom.allocated_bytes,
            "reserved": each.oom.reserved_bytes,
        }
        for each in _probed(snapshot)
        if each.oom is not None
    ]


def _probed(snapshot: Snapshot) -> tuple[ProbedProcess, ...]:
    probe = snapshot.probe
    if probe is None or isinstance(probe, Failure):
        return ()
    return (*probe.present, *probe.silent, *probe.others)


def _json_of(value: object) -> Any:  # noqa: ANN401 - a value of JSON
    """Return a value without what it does not say."""
    if isinstance(value, Struct):
        return {name: _json_of(each) for name, each in asdict(value).items() if each is not None}
    return [_json_of(each) for each in value] if isinstance(value, tuple) else value


def _leak(values: Values, gpu: str, uuid: str) -> dict[str, Any]:
    figures = {metric.name.removeprefix("headroom_"): values.value(metric, gpu, uuid) for metric in FIGURES}
    finite = {name: value for name, value in figures.items() if value is not None and isfinite(value)}
    return {"gpu": int(gpu), "uuid": uuid, "state": values.state(catalog.LEAK_STATE, gpu, uuid), **finite}


MOST_LOOKS: Final = 600
LEAST_SECONDS: Final = 0.9
"""A look a second at the most, with room for one that comes early. With eight GPUs it all takes 0.5 MB."""

MOST_XIDS: Final = 32
MOST_GPUS: Final = 16
"""What one engine has on one machine: so many are 260 kB in the header of an incident."""


class Recent:
    """Keeps the newest looks between ticks, and in `xids` the driver's newest errors, in seconds since the epoch."""

    def __init__(self) -> None:
        self.xids: deque[dict[str, Any]] = deque(maxlen=MOST_XIDS)
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=MOST_LOOKS)
        self._counted: dict[tuple[str, int], int] | None = None

    def add(self, seconds: float, used_bytes: Mapping[str, int]) -> None:
        """Take a look at GPUs, by UUID."""
        if used_bytes and (not self._looks or abs(seconds - self._looks[-1][0]) >= LEAST_SECONDS):
            self._looks.append((round(seconds, 1), used_bytes))

    def note(self, snapshot: Snapshot) -> None:
        """Take note of the XID errors that are new in a sample."""
        if not snapshot.devices:
            return
        counts = {(gpu.reading.uuid, xid): n for gpu in snapshot.devices for xid, n in gpu.reading.xid_errors}
        before, self._counted = self._counted, {**(self._counted or {}), **counts}
        if before is None:  # what was counted before this process could tell when
            return
        for (uuid, xid), count in counts.items():
            if count > before.get((uuid, xid), 0):
                self.xids.append({"t": round(snapshot.time_seconds, 3), "uuid": uuid, "xid": xid})

    def of(self, uuids: Iterable[str]) -> dict[str, list[tuple[float, int]]]:
        """Return the looks at these GPUs, as time and memory in use."""
        return {
            uuid: [(seconds, seen[uuid]) for seconds, seen in self._looks if uuid in seen]
            for uuid in sorted(uuids)[:MOST_GPUS]
        }
