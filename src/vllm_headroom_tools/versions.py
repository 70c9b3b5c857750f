"""Versions of vLLM, and their known leaks and faults."""

import re
from collections.abc import Collection, Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import Role

Version = tuple[int, int, int]

OLDEST_SUPPORTED: Final[Version] = (0, 4, 0)
"""The oldest version whose metrics page is supported."""

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(.*)", re.ASCII | re.DOTALL)
_PRERELEASE: Final = re.compile(r"[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)", re.IGNORECASE)


def parse_version(text: str) -> Version | None:
    """Return the version in a text.

    Returns None if the version is too old or not a release, such as a nightly. A release candidate
    or development version may lack features of its release. Such a version is therefore treated as
    the previous release: 0.12.0rc1 becomes 0.11.0.
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        return None
    major = int(match[1])
    minor = int(match[2])
    patch = int(match[3] or 0)
    # A release candidate may lack features of its release.
    if _PRERELEASE.match(match[4]):
        if patch:
            patch -= 1
        else:
            minor = max(0, minor - 1)
    version = (major, minor, patch)
    return version if version >= OLDEST_SUPPORTED else None


def format_version(version: Version) -> str:
    """Format a version in vLLM's notation, such as 0.11.2."""
    return ".".join(map(str, version))


class Fault(Struct, frozen=True):
    """A fault of vLLM."""

    issues: str
    """The issue numbers in vllm-project/vllm."""

    effect: str
    """What the fault affects, such as "GPU memory" or "start"."""

    text: str
    """The description of the fault."""

    options: tuple[str, ...] = ()
    """vLLM settings, any of which makes the fault possible; empty if none is required."""

    reported: str = ""
    """The month of the report; empty if it is unknown."""

    first_version: Version = OLDEST_SUPPORTED

    last_version: Version | None = None
    """The newest version in which the fault was observed, or None if unknown."""

    fixed_version: Version | None = None
    """The first version in which the fault is fixed, or None if unknown."""

    role: Role | None = None
    """The kind of process whose host memory grows. None if host memory does not grow."""

    advice: str = ""
    """The steps that stop the growth; empty if none are known to help."""

    def is_in(self, version: Version) -> bool:
        """Return whether this version has the fault.

        Versions newer than the last one with the fault are assumed not to have it. These versions
        are assumed not to have the fault even if they are older than the version with the fix.
        """
        if version < self.first_version:
            return False
        if self.fixed_version is not None and version >= self.fixed_version:
            return False
        return self.last_version is None or version <= self.last_version


_HOST: Final = "host memory"
_CONNECTOR: Final = ("kv_transfer_config",)
_OFFLOADS: Final = ("kv_offloading_size", *_CONNECTOR)

FAULTS: Final = (
    Fault(
        issues="#44490",
        effect=_HOST,
        text="the engine core never empties a list of block ids: 0.6 GiB in 12 h",
        reported="2026-06",
        first_version=(0, 18, 0),
        fixed_version=(0, 26, 0),
        role=Role.ENGINE_CORE,
        advice="Upgrade to vLLM 0.26 or newer: from 0.18 to 0.25 a list of block ids is never"
        " emptied (vllm-project/vllm#44490)",
    ),
    Fault(
        issues="#50150",
        effect=_HOST,
        text="without CUDA graphs, workers grow to the container's limit",
        options=("enforce_eager",),
        first_version=(0, 24, 0),
        last_version=(0, 27, 1),
        role=Role.WORKER,
        advice="If CUDA graphs are turned off, turn them on: without them workers of 0.24 to 0.27.1"
        " leak (vllm-project/vllm#50150)",
    ),
    Fault(
        issues="#24264",
        effect=_HOST,
        text="mmap hooks of UCX leak below NIXL, between prefill and decode engines",
        options=_CONNECTOR,
        reported="2026-01",
    ),
    Fault(
        issues="#42207, #54839",
        effect=_HOST,
        text="an unloaded adapter keeps its host copy and its GPU slot",
        options=("enable_lora",),
    ),
    Fault(
        issues="#53042",
        effect=_HOST,
        text="a tier of the KV cache takes up to 1.92 times its size, as shared memory",
        options=_OFFLOADS,
    ),
    Fault(
        issues="#56410",
        effect=_HOST,
        text="offloaded weights take up to 1.9 times their size",
        options=("cpu_offload_gb",),
    ),
    Fault(
        issues="#51317, #51579, #54002",
        effect="start",
        text="vllm_offload_*.mmap stays in /dev/shm after a kill, and the next start fails",
        options=_OFFLOADS,
    ),
    Fault(
        issues="#45178, #57936",
        effect="start",
        text="the estimate for CUDA graphs is too large: a smaller KV cache than could be",
        first_version=(0, 21, 0),
    ),
    Fault(
        issues="#53787",
        effect="GPU memory",
        text="without its check of free memory, a version that needs more fails in a request",
        options=("kv_cache_memory_bytes",),
    ),
    Fault(
        issues="#46283",
        effect="KV cache",
        text="with NixlPush, blocks of loads that were aborted are never freed",
        options=_CONNECTOR,
    ),
    Fault(
        issues="#43736",
        effect="figures",
        text="a blocked request counts in the prefix cache's queries and hits at every step",
        first_version=(0, 7, 3),
        fixed_version=(0, 27, 0),
    ),
    Fault(
        issues="#25780",
        effect="figures",
        text="requests computed again after a preemption count as prefix-cache hits",
        fixed_version=(0, 11, 1),
    ),
)
"""The faults found in vLLM's issues and wheels, as of September 2026."""


def list_faults(version: Version, options: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of a version that are possible with these options.

    Options are named like vLLM's settings, for example `enforce_eager`.
    """
    for fault in FAULTS:
        can_occur = not fault.options or not set(fault.options).isdisjoint(options)
        if can_occur and fault.is_in(version):
            yield fault


def describe_fault(fault: Fault) -> str:
    """Describe a fault in one line: its effect, issues, date of report, and fixed version."""
    status = "open"
    if fault.fixed_version is not None:
        status = f"fixed in {format_version(fault.fixed_version)}"
    if fault.reported:
        status = f"{fault.reported}, {status}"
    return f"{fault.effect}: {fault.text} (vllm-project/vllm{fault.issues}; {status})"
