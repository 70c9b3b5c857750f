"""Read AMD's cards from /sys, even if cards fail or disappear."""

import contextlib
import errno
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.model import Failure, GpuReading, Vendor
from vllm_headroom.scrape.amd.cards import (
    DRM_FOLDER,
    TOPOLOGY_FOLDER,
    AmdCard,
    find_cards,
    list_folder,
    read_number_file,
)
from vllm_headroom.scrape.amd.device import ReadContext, read_card, read_memory
from vllm_headroom.scrape.gpu_state import GpuTransitions, RecentPeak
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

_REASONS: Final = {
    None: Reason.TIMEOUT,  # The thread's TimeoutError has no error number.
    errno.ENODEV: Reason.DEVICE_LOST,
    errno.ENOENT: Reason.DEVICE_LOST,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
}
"""The failure reason for each OSError number. For any other number, the reason is DRIVER_ERROR."""

_LOOK: Final = "look for amdgpu lines in the node's kernel log"
_MESSAGES: Final = {
    Reason.DEVICE_LOST: f"the GPU is lost: {_LOOK}, then reset the GPU or reboot the node",
    Reason.NO_PERMISSION: (
        "this user may not read the GPU's memory in /sys: show /sys to this container as every"
        " container sees it"
    ),
    Reason.TIMEOUT: f"the GPU does not answer: {_LOOK}, and reset the GPU if it stays so",
    Reason.DRIVER_ERROR: f"the GPU cannot be read: {_LOOK}",
}

SEARCH_INTERVAL_SECONDS: Final = 15.0
"""The pause between two searches while no card has been found. With only NVIDIA GPUs, the thread
would otherwise wake for every sample.
"""


def explain_error(error: OSError) -> Failure:
    """Return the failure for an error in a card's file or a thread's timeout."""
    reason = _REASONS.get(error.errno, Reason.DRIVER_ERROR)
    suffix = "" if reason is Reason.TIMEOUT else f" ({error.strerror or error})"
    return Failure(source=Source.NVML, reason=reason, message=_MESSAGES[reason] + suffix)


class Amd:
    """Reads all AMD cards on a separate thread, because a faulty driver may block.

    Indices follow the order of PCI addresses. A card keeps its index, and a card that is gone stays
    listed as failed.
    """

    def __init__(self, *, monotonic: Callable[[], float], sys: Path, proc: Path) -> None:
        self.integrated_uuids: frozenset[str] = frozenset()
        """The UUIDs of the integrated GPUs in the last reading."""
        self._monotonic = monotonic
        self._sys = str(sys)
        self._proc = proc
        self._cards: dict[str, AmdCard] = {}
        """The cards, keyed by UUID. The position of a card in this mapping is its index."""
        self._last_readings: dict[str, tuple[GpuReading, ...]] = {}
        """The last readings of each card or its partitions, keyed by the card's UUID."""
        self._topology: object = None
        """The driver's list of cards and KFD's generation number at the last search. A change means
        that cards were added, removed or repartitioned.
        """
        self._search_at_seconds = float("-inf")
        """When the next search may begin while there is no card, on the monotonic clock."""
        self._peaks: defaultdict[str, RecentPeak] = defaultdict(RecentPeak)
        self._transitions = GpuTransitions()
        self._worker = Worker[Any]("amd")

    async def read(self, timeout_seconds: float) -> tuple[GpuReading, ...]:
        """Return a reading of every card or partition.

        The tuple is empty if there is no card. Never raises. A card that cannot be read in time
        gets a failed reading.
        """
        now_seconds = self._monotonic()
        if not self._cards and now_seconds < self._search_at_seconds:
            return ()
        self._search_at_seconds = now_seconds + SEARCH_INTERVAL_SECONDS
        readings: tuple[GpuReading, ...] = ()
        try:
            readings = await self._worker.call(self._read, timeout_seconds)
        except OSError as error:
            failure = explain_error(error)
            for index, card in enumerate(self._cards.values()):
                readings += self._build_failed(card, index, failure)
        self._transitions.report(readings)
        return readings

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return each GPU's memory in use, keyed by UUID, and update the peaks.

        Partitioned cards and cards that cannot be read are omitted. The result is empty after a
        timeout.
        """
        if not self._cards:
            return {}
        with contextlib.suppress(OSError):  # TimeoutError is an OSError.
            used_bytes: dict[str, int] = await self._worker.call(self._sample, timeout_seconds)
            return used_bytes
        return {}

    def close(self) -> None:
        """End the thread once it has finished its work."""
        self._worker.stop()

    def _read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every card or partition; runs on the thread."""
        self._find_cards()
        context = ReadContext(
            sys=self._sys, proc=self._proc, now=self._monotonic(), peaks=self._peaks
        )
        readings: list[GpuReading] = []
        integrated_uuids: set[str] = set()
        for index, card in enumerate(self._cards.values()):
            try:
                card_readings = read_card(card, index, context)
                self._last_readings[card.uuid] = card_readings
            except OSError as error:
                card_readings = self._build_failed(card, index, explain_error(error))
            readings += card_readings
            integrated_uuids |= {
                reading.uuid for reading in card_readings if _is_integrated(card, reading)
            }
        self.integrated_uuids = frozenset(integrated_uuids)
        return tuple(readings)

    def _find_cards(self) -> None:
        """Search for cards again if one may have been added, removed or repartitioned."""
        topology = (
            list_folder(f"{self._sys}/{DRM_FOLDER}"),
            read_number_file(f"{self._sys}/{TOPOLOGY_FOLDER}/generation_id"),
        )
        if topology != self._topology:
            self._topology = topology
            # Known cards keep their positions even if they are gone. A card's position is its
            # index.
            self._cards = self._cards | find_cards(self._sys)

    def _build_failed(self, card: AmdCard, index: int, failure: Failure) -> tuple[GpuReading, ...]:
        """Return a failed reading of each partition in the card's last reading.

        If no partitions are known, returns one failed reading of the whole card.
        """
        whole_card = GpuReading(vendor=Vendor.AMD, index=index, uuid=card.uuid, name=card.name)
        last_readings = self._last_readings.get(card.uuid, (whole_card,))
        return tuple(reading.mark_failed(failure) for reading in last_readings)

    def _sample(self) -> dict[str, int]:
        """Return what `sample_used` returns; runs on the thread."""
        used_bytes: dict[str, int] = {}
        for card in self._cards.values():
            if card.nodes is not None and len(card.nodes) > 1:
                continue
            with contextlib.suppress(OSError):  # The next reading finds and reports the error.
                memory = read_memory(card, self._proc)
                if memory is not None:
                    used_bytes[card.uuid] = memory.used_bytes
                    self._peaks[card.uuid].add(self._monotonic(), memory.used_bytes)
        return used_bytes


def _is_integrated(card: AmdCard, reading: GpuReading) -> bool:
    """Return whether a GPU uses the machine's memory. If unknown, return whether it is an APU."""
    if reading.memory is None:
        return card.is_apu
    return reading.memory.is_unified
