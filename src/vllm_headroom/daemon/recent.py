"""What was seen shortly before an incident: the memory in use between ticks, and errors of the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from vllm_headroom.model import Snapshot

MOST_LOOKS: Final = 600
LEAST_SECONDS: Final = 0.9
"""A look a second at the most, with room for one that comes early. With eight GPUs it all takes 0.5 MB."""

MOST_XIDS: Final = 32
MOST_GPUS: Final = 16
"""What one engine has on one machine: so many are 260 kB in the header of an incident."""


class Recent:
    """Keeps the newest looks, and in `xids` the newest errors; times are in seconds since the epoch."""

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
