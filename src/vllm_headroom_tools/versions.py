"""Versions of vLLM, and the leaks and faults that are known of each."""

import re
from collections.abc import Collection, Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import Role

Version = tuple[int, int, int]

OLDEST: Final[Version] = (0, 4, 0)
"""The oldest version whose page is read."""

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(.*)", re.ASCII | re.DOTALL)
_EARLIER: Final = re.compile(r"[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)", re.IGNORECASE)


def parse_version(text: str) -> Version | None:
    """Parse a version; None where the text is not one of a release, as with nightlies.

    A candidate or development version counts as the release before: it may lack what the release adds.
    """
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        return None
    version = major, minor, patch = (int(found[1]), int(found[2]), int(found[3] or 0))
    if _EARLIER.match(found[4]):
        version = (major, minor, patch - 1) if patch else (major, max(0, minor - 1), 0)
    return version if version >= OLDEST else None


def format_version(version: Version) -> str:
    """Format a version as vLLM does."""
    return ".".join(map(str, version))


class Fault(Struct, frozen=True):
    """A fault of vLLM: issues of vllm-project/vllm, what it harms, what happens, and when it was reported.

    It is in the versions from `first` to before `mended`, and was seen up to `last`; None where that is not known. With
    `options` it needs one of them. `role` is whose host memory grows, `cure` what to do about it.
    """

    issues: str
    effect: str
    text: str
    options: tuple[str, ...] = ()
    reported: str = ""
    first: Version = OLDEST
    last: Version | None = None
    mended: Version | None = None
    role: Role | None = None
    cure: str = ""

    def is_in(self, version: Version) -> bool:
        """Return whether this version has the fault, as far as is known."""
        is_mended = self.mended is not None and version >= self.mended
        return (
            self.first <= version and not is_mended and (self.last is None or version <= self.last)
        )


_HOST: Final = "host memory"
_CONNECTOR: Final = ("kv_transfer_config",)
_OFFLOADS: Final = ("kv_offloading_size", *_CONNECTOR)

FAULTS: Final = (
    Fault(
        *("#44490", _HOST, "the engine core never empties a list of block ids: 0.6 GiB in 12 h"),
        reported="2026-06",
        first=(0, 18, 0),
        mended=(0, 26, 0),
        role=Role.ENGINE_CORE,
        cure="Upgrade to vLLM 0.26 or newer: from 0.18 to 0.25 a list of block ids is never emptied"
        " (vllm-project/vllm#44490)",
    ),
    Fault(
        *(
            "#50150",
            _HOST,
            "without CUDA graphs, workers grow to the container's limit",
            ("enforce_eager",),
        ),
        first=(0, 24, 0),
        last=(0, 27, 1),
        role=Role.WORKER,
        cure="If CUDA graphs are turned off, turn them on: without them workers of 0.24 to 0.27.1 leak"
        " (vllm-project/vllm#50150)",
    ),
    Fault(
        "#24264",
        _HOST,
        "mmap hooks of UCX leak below NIXL, between prefill and decode engines",
        _CONNECTOR,
        "2026-01",
    ),
    Fault(
        "#42207, #54839",
        _HOST,
        "an unloaded adapter keeps its host copy and its GPU slot",
        ("enable_lora",),
    ),
    Fault(
        "#53042",
        _HOST,
        "a tier of the KV cache takes up to 1.92 times its size, as shared memory",
        _OFFLOADS,
    ),
    Fault(
        "#56410", _HOST, "offloaded weights take up to 1.9 times their size", ("cpu_offload_gb",)
    ),
    Fault(
        *("#51317, #51579, #54002", "start"),
        *(
            "vllm_offload_*.mmap stays in /dev/shm after a kill, and the next start fails",
            _OFFLOADS,
        ),
    ),
    Fault(
        *(
            "#45178, #57936",
            "start",
            "the estimate for CUDA graphs is too large: a smaller KV cache than could be",
        ),
        first=(0, 21, 0),
    ),
    Fault(
        *(
            "#53787",
            "GPU memory",
            "without its check of free memory, a version that needs more fails in a request",
        ),
        options=("kv_cache_memory_bytes",),
    ),
    Fault(
        "#46283",
        "KV cache",
        "with NixlPush, blocks of loads that were aborted are never freed",
        _CONNECTOR,
    ),
    Fault(
        *(
            "#43736",
            "figures",
            "a blocked request counts in the prefix cache's queries and hits at every step",
        ),
        first=(0, 7, 3),
        mended=(0, 27, 0),
    ),
    Fault(
        *(
            "#25780",
            "figures",
            "requests computed again after a preemption count as prefix-cache hits",
        ),
        mended=(0, 11, 1),
    ),
)
"""From the issues and the wheels of vLLM, as read in September 2026."""


def list_faults(version: Version, options: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of a version that can occur with these options, by the names of vLLM's settings."""
    for fault in FAULTS:
        if fault.is_in(version) and (
            not fault.options or not set(fault.options).isdisjoint(options)
        ):
            yield fault


def describe_fault(fault: Fault) -> str:
    """Return a line on a fault, its report and the version that mends it."""
    mended = "open" if fault.mended is None else f"mended in {format_version(fault.mended)}"
    reported = f"{fault.reported}, " if fault.reported else ""
    return f"{fault.effect}: {fault.text} (vllm-project/vllm{fault.issues}; {reported}{mended})"
