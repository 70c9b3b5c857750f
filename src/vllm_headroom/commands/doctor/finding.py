"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Name(StrEnum):
    """What is looked at, in the order in which it is told; a closed set, for scripts."""

    ENGINE = "engine"
    ENGINE_INPUTS = "engine_inputs"
    REPORTED_MEMORY = "reported_memory"
    KV_BYTES = "kv_bytes"
    NVML = "nvml"
    GPUS = "gpus"
    GPU_ATTRIBUTION = "gpu_attribution"
    PROCESSES = "processes"
    PROCESS_MEMORY = "process_memory"
    PROBE = "probe"
    LISTEN_PORT = "listen_port"
    STATE_DIR = "state_dir"
    TRACE_FILE = "trace_file"


class State(StrEnum):
    """How it stands with one thing; what could not be found out is never called available or missing."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One way to mend a thing: the lines to write, and where; several of them are alternatives."""

    where: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How it stands with one thing.

    `text` says what was found, what is missing, or why it cannot be told or does not apply. `absent` are the series
    that are not on the daemon's page meanwhile; one that ends in `*` stands for all that begin so.
    """

    name: Name
    state: State
    text: str
    details: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()


def all_available(findings: tuple[Finding, ...]) -> bool:
    """Tell whether nothing is missing and nothing is left unknown."""
    return all(finding.state in {State.OK, State.NOT_APPLICABLE} for finding in findings)
