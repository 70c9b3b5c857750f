"""The one place where an NVML call for a single fact may fail."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, TypeVar

import pynvml

from vllm_headroom.scrape.nvml.errors import BLOCKED, DRIVER_WIDE, LOST, NEVER_ANSWERED

T = TypeVar("T")


class Handle(Protocol):
    """NVML's pointer to a device; valid until NVML is shut down or the device is lost."""

    contents: ctypes.Structure


class Calls:
    """Asks devices for facts, and remembers which they never tell; lives from one init of NVML to the next.

    What a device has told once it will tell again, whatever it answers in between.
    """

    def __init__(self) -> None:
        self._answered: set[tuple[str, str]] = set()
        self._never_answered: set[tuple[str, str]] = set()
        self._unsupported: set[tuple[str, str]] = set()

    def ask(self, uuid: str, fact: str, call: Callable[[], T], *, essential: bool = False) -> T | None:
        """Return what `call` returns, None where the device does not tell it now or at all.

        Raises NVMLError when not the fact but its device or the whole driver fails. NVML's "unknown error" on one call
        has been seen on healthy devices: it fails the device only where the fact is `essential`. Such a fact is asked
        for again whatever was answered, because one transient error must not blind for good. A text that is not UTF-8
        is not told.
        """
        if (uuid, fact) in self._never_answered:
            return None
        try:
            value = call()
        except UnicodeDecodeError:
            return None
        except pynvml.NVMLError as error:
            if error.value in LOST | DRIVER_WIDE or (essential and error.value in BLOCKED):
                raise
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                self._unsupported.add((uuid, fact))
            if error.value in NEVER_ANSWERED and not essential and (uuid, fact) not in self._answered:
                self._never_answered.add((uuid, fact))
            return None
        self._answered.add((uuid, fact))
        return value

    def forget(self, uuid: str) -> None:
        """Let go of what a device has answered that is gone."""
        for known in (self._answered, self._never_answered, self._unsupported):
            known.difference_update([key for key in known if key[0] == uuid])

    def is_unsupported(self, uuid: str, fact: str) -> bool:
        """Tell whether the device said that it does not know this, and has never told it."""
        return (uuid, fact) in self._unsupported - self._answered
