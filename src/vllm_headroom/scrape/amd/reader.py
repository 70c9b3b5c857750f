"""Read AMD's cards from /sys, including cards that fail or disappear."""

import contextlib
import errno
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.model import Failure, GpuReading, Vendor
from vllm_headroom.scrape.amd.cards import DRM, TOPOLOGY, Card, find_cards, list_names, read_number
from vllm_headroom.scrape.amd.device import ReadContext, read_card, read_memory
from vllm_headroom.scrape.gpu_state import GpuTransitions, Peak
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

_REASONS: Final = {
    None: Reason.TIMEOUT,  # of the thread
    errno.ENODEV: Reason.DEVICE_LOST,
    errno.ENOENT: Reason.DEVICE_LOST,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
}
_LOOK: Final = "look for amdgpu lines in the node's kernel log"
_MESSAGES: Final = {
    Reason.DEVICE_LOST: f"the GPU is lost: {_LOOK}, then reset the GPU or reboot the node",
    Reason.NO_PERMISSION: (
        "this user may not read the GPU's memory in /sys: show /sys to this container as every container sees it"
    ),
    Reason.TIMEOUT: f"the GPU does not answer: {_LOOK}, and reset the GPU if it stays so",
    Reason.DRIVER_ERROR: f"the GPU cannot be read: {_LOOK}",
}


def explain_error(error: OSError) -> Failure:
    """Return the failure of one card that an error of its file, or the thread's TimeoutError, means."""
    reason = _REASONS.get(error.errno, Reason.DRIVER_ERROR)
    suffix = "" if reason is Reason.TIMEOUT else f" ({error.strerror or error})"
    return Failure(source=Source.NVML, reason=reason, message=_MESSAGES[reason] + suffix)


LOOK_AGAIN_SECONDS: Final = 15.0
"""Without a card: on a machine with NVIDIA's GPUs the thread is not woken at every sample."""


class Amd:
    """Reads all cards that amdgpu drives, on a separate thread: a sensor may block while the driver is faulty.

    `integrated_uuids` are the UUIDs of integrated GPUs that use the machine's memory, or do not report theirs. A card keeps
    its first index, in the order of PCI addresses, and stays listed when it is gone.
    """

    def __init__(self, *, monotonic: Callable[[], float], sys: Path, proc: Path) -> None:
        self.integrated_uuids: frozenset[str] = frozenset()
        self._monotonic = monotonic
        self._sys = str(sys)
        self._proc = proc
        self._cards: dict[str, Card] = {}
        self._parts: dict[str, tuple[GpuReading, ...]] = {}
        self._seen: object = None
        self._look_again_at = float("-inf")
        self._peaks: defaultdict[str, Peak] = defaultdict(Peak)
        self._transitions = GpuTransitions()
        self._worker = Worker[Any]("amd")

    async def read(self, timeout_seconds: float) -> tuple[GpuReading, ...]:
        """Return a reading of every card or partition, none where there is no card; does not raise."""
        if not self._cards and self._monotonic() < self._look_again_at:
            return ()
        self._look_again_at = self._monotonic() + LOOK_AGAIN_SECONDS
        try:
            found: tuple[GpuReading, ...] = await self._worker.call(self._read, timeout_seconds)
        except OSError as error:
            why, cards = explain_error(error), enumerate(self._cards.values())
            found = tuple(each for index, card in cards for each in self._failed(card, index, why))
        self._transitions.report(found)
        return found

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID of every card without partitions, and add it to its peak."""
        with contextlib.suppress(OSError):  # TimeoutError is one
            used: dict[str, int] = (
                await self._worker.call(self._sample, timeout_seconds) if self._cards else {}
            )
            return used
        return {}

    def close(self) -> None:
        """End the thread when it has nothing more to do."""
        self._worker.stop()

    def _read(self) -> tuple[GpuReading, ...]:
        # these change when a card is added, removed or repartitioned
        now = list_names(f"{self._sys}/{DRM}"), read_number(f"{self._sys}/{TOPOLOGY}/generation_id")
        if now != self._seen:
            self._seen, self._cards = now, self._cards | find_cards(self._sys)
        look = ReadContext(sys=self._sys, proc=self._proc, now=self._monotonic(), peaks=self._peaks)
        found: list[tuple[Card, GpuReading]] = []
        for index, card in enumerate(self._cards.values()):
            try:
                parts = self._parts[card.uuid] = read_card(card, index, look)
            except OSError as error:
                parts = self._failed(card, index, explain_error(error))
            found += [(card, part) for part in parts]
        self.integrated_uuids = frozenset(
            part.uuid
            for card, part in found
            if (part.memory.is_unified if part.memory is not None else card.is_apu)
        )
        return tuple(part for _, part in found)

    def _failed(self, card: Card, index: int, why: Failure) -> tuple[GpuReading, ...]:
        """Return a failed reading of each part that the card had at its last reading."""
        whole = GpuReading(vendor=Vendor.AMD, index=index, uuid=card.uuid, name=card.name)
        return tuple(part.failed(why) for part in self._parts.get(card.uuid, (whole,)))

    def _sample(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for card in self._cards.values():
            if card.nodes is not None and len(card.nodes) > 1:
                continue
            with contextlib.suppress(OSError):  # the next reading finds and reports it
                memory = read_memory(card, self._proc)
                if memory is not None:
                    used[card.uuid] = memory.used_bytes
                    self._peaks[card.uuid].add(self._monotonic(), memory.used_bytes)
        return used
