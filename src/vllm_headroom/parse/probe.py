"""Parse the file that the probe writes for one process."""

import json
from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom.model import (
    AllocatorHistory,
    AllocatorReading,
    AllocatorSnapshot,
    Cgroup,
    HostReading,
    LineHolding,
    OomRecord,
    ProbedProcess,
    SchedulerReading,
    Shm,
    WorkerMeasurements,
)
from vllm_headroom.parse import fields
from vllm_headroom.parse.peaks import read_peaks, read_step_at_error
from vllm_headroom.vocabulary import Role

FORMAT_FIELD: Final = "headroom_probe"
"""The field that identifies a probe file; its value is the version of the format."""

FORMAT_VERSION: Final = 1

LONGEST_LABEL: Final = 200
"""The maximum number of characters kept from a text."""

MOST_LINES: Final = 10
"""The number of lines of code kept from a snapshot. The probe reports no more."""

MOST_DEVICES: Final = 64
"""The maximum number of devices per process, which is more than any node has."""

DEFAULT_INTERVAL_SECONDS: Final = 5.0
"""The write interval assumed for a file that does not state its interval."""


def parse_probe(content: bytes) -> tuple[ProbedProcess, str | None] | str:
    """Return the process that a file describes, and its boot ID (None if unknown).

    Returns a description of the mistake if the file cannot be used. The engine's container can
    write the file. A single wrong field makes the file unusable. Unknown fields are ignored.
    """
    try:
        document = json.loads(content, parse_constant=fields.refuse_number)
        if type(document) is not dict or document.get(FORMAT_FIELD) != FORMAT_VERSION:
            return f"no file of a probe of version {FORMAT_VERSION}"
        return _read_process(document), _read_label(document, "boot_id")
    except fields.WrongFieldError as wrong:
        return str(wrong)
    except RecursionError:
        return "not JSON of a probe: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"[:LONGEST_LABEL]


def _read_process(document: Mapping[str, Any]) -> ProbedProcess:
    """Return the process that a document describes; raises WrongFieldError."""
    devices = fields.read_each(document, "devices", _read_device) or ()
    if len(devices) > MOST_DEVICES:
        raise fields.WrongFieldError("devices", len(devices), f"at most {MOST_DEVICES} entries")
    # Fields are read in this order, and the first wrong field is reported.
    pid = int(_read_needed(document, "pid"))
    written_at_seconds = _read_needed(document, "t")
    role = _read_role(document)
    interval_seconds = fields.read_number(document, "interval_seconds")
    oom = fields.read_within(document, "oom", _read_oom)
    if oom is not None and oom.at_seconds > written_at_seconds:
        # An error dated in the future would seem to cause every later exit.
        oom = None
    return ProbedProcess(
        pid=pid,
        started_at_seconds=_read_needed(document, "started_at"),
        since_boot_seconds=fields.read_number(document, "started_since_boot"),
        written_at_seconds=written_at_seconds,
        interval_seconds=DEFAULT_INTERVAL_SECONDS if interval_seconds is None else interval_seconds,
        role=role,
        stopped=_read_label(document, "stopped"),
        data_parallel_rank=fields.read_size(document, "data_parallel_rank"),
        vllm_version=_read_label(document, "vllm"),
        devices=devices,
        parts=fields.read_within(document, "parts", _read_parts),
        scheduler=fields.read_within(document, "scheduler", _read_scheduler),
        host=fields.read_within(document, "host", _read_host),
        pinned_bytes=fields.read_size(document, "pinned"),
        oom=oom,
        peaks=fields.read_within(document, "peaks", read_peaks),
        history=fields.read_within(document, "snapshot", _read_history),
    )


def _read_role(document: Mapping[str, Any]) -> Role:
    """Return the process's role, or OTHER if the role is missing or unknown."""
    name = fields.read_text(document, "role")
    return next((role for role in Role if role == name), Role.OTHER)


def _read_needed(entry: Mapping[str, Any], field: str) -> float:
    """Return a number; raise WrongFieldError if the field is missing or wrong."""
    value = fields.read_number(entry, field)
    if value is None:
        raise fields.WrongFieldError(field, None, "a number, 0 or more")
    return value


def _read_label(entry: Mapping[str, Any], field: str) -> str | None:
    """Return the beginning of a text, or None if it is missing."""
    value = fields.read_text(entry, field)
    return None if value is None else value[:LONGEST_LABEL]


def _read_device(entry: dict[str, Any], _index: int) -> AllocatorReading:
    """Return the allocator's figures for one device; raise WrongFieldError if it has no UUID."""
    uuid = _read_label(entry, "uuid")
    if uuid is None:
        raise fields.WrongFieldError("uuid", None, "the UUID of a device")
    return AllocatorReading(
        uuid=uuid,
        **_read_bytes(entry, "total", "allocated", "reserved", "inactive_split"),
        retries=fields.read_size(entry, "retries"),
        ooms=fields.read_size(entry, "ooms"),
    )


def _read_parts(entry: dict[str, Any]) -> WorkerMeasurements:
    return WorkerMeasurements(
        **_read_bytes(entry, "weights", "kv_cache", "cuda_graphs", "activation_peak", "requested"),
        asleep=fields.read_truth(entry, "asleep"),
        pool=fields.read_within(entry, "pool", _read_parts),
    )


def _read_scheduler(entry: dict[str, Any]) -> SchedulerReading:
    """Return the scheduler's values; a ratio is None if it cannot be computed."""
    total_blocks = fields.read_size(entry, "kv_blocks_total")
    free_blocks = fields.read_size(entry, "kv_blocks_free")
    live_blocks = fields.read_size(entry, "kv_blocks_live")
    live_tokens = fields.read_size(entry, "kv_tokens_live")
    block_tokens = fields.read_size(entry, "block_size")
    # vLLM reserves one block of the pool for itself.
    usable_blocks = (total_blocks or 0) - 1
    stranded_ratio = None
    if usable_blocks > 0 and free_blocks is not None and live_blocks is not None:
        stranded_ratio = max(0.0, 1 - (free_blocks + live_blocks) / usable_blocks)
    token_ratio = None
    if usable_blocks > 0 and live_tokens is not None and block_tokens:
        token_ratio = min(1.0, live_tokens / (block_tokens * usable_blocks))
    return SchedulerReading(
        steps_total=fields.read_size(entry, "steps_total"),
        max_num_seqs=fields.read_size(entry, "max_num_seqs"),
        kv_stranded_ratio=stranded_ratio,
        kv_token_ratio=token_ratio,
    )


def _read_bytes(entry: Mapping[str, Any], *names: str) -> dict[str, int | None]:
    """Return sizes, keyed by name with the unit added: `total` becomes `total_bytes`."""
    return {f"{name}_bytes": fields.read_size(entry, name) for name in names}


def _read_host(entry: dict[str, Any]) -> HostReading:
    return HostReading(
        cgroup=fields.read_within(entry, "cgroup", _read_cgroup),
        shm=fields.read_within(entry, "shm", _read_shm),
    )


def _read_cgroup(entry: dict[str, Any]) -> Cgroup | None:
    """Return the container's memory, or None if the used memory is missing."""
    used_bytes = fields.read_size(entry, "used")
    cache_bytes = fields.read_size(entry, "file")
    limit_bytes = fields.read_size(entry, "limit")
    oom_kills = fields.read_size(entry, "oom_kills")
    if used_bytes is None:
        return None
    return Cgroup(
        identity="probe",
        used_bytes=used_bytes,
        cache_bytes=cache_bytes or 0,
        limit_bytes=limit_bytes,
        oom_kills=oom_kills,
    )


def _read_shm(entry: dict[str, Any]) -> Shm | None:
    """Return the size of /dev/shm, or None if either of its two figures is missing.

    Raises WrongFieldError for a figure that is not a size.
    """
    used_bytes = fields.read_size(entry, "used")
    limit_bytes = fields.read_size(entry, "limit")
    if used_bytes is None or limit_bytes is None:
        return None
    return Shm(total_bytes=limit_bytes, free_bytes=limit_bytes - used_bytes)


def _read_oom(entry: dict[str, Any]) -> OomRecord:
    """Return one OutOfMemoryError; raise WrongFieldError for a wrong field."""
    return OomRecord(
        at_seconds=_read_needed(entry, "t"),
        seen=fields.read_size(entry, "seen"),
        uuid=_read_label(entry, "uuid"),
        **_read_bytes(entry, "asked", "free", "allocated", "reserved"),
        step=fields.read_within(entry, "step", read_step_at_error),
    )


def _read_history(entry: dict[str, Any]) -> AllocatorHistory:
    return AllocatorHistory(
        from_seconds=_read_needed(entry, "history_from"),
        oom=fields.read_within(entry, "oom", _read_snapshot),
        requested=fields.read_within(entry, "requested", _read_snapshot),
    )


def _read_snapshot(entry: dict[str, Any]) -> AllocatorSnapshot:
    """Return the probe's report on a snapshot; raise WrongFieldError for a wrong field."""
    return AllocatorSnapshot(
        at_seconds=_read_needed(entry, "t"),
        file=_read_label(entry, "file") or "",
        size_bytes=fields.read_size(entry, "bytes"),
        pause_seconds=fields.read_number(entry, "pause_seconds"),
        request_id=_read_label(entry, "request"),
        problem=_read_label(entry, "problem"),
        largest=tuple(fields.read_each(entry, "largest", _read_line) or ())[:MOST_LINES],
    )


def _read_line(entry: dict[str, Any], _index: int) -> LineHolding:
    """Return the memory held by a line of code; raise WrongFieldError for a wrong field."""
    return LineHolding(
        file=_read_label(entry, "file"),
        line=fields.read_size(entry, "line"),
        size_bytes=fields.read_size(entry, "bytes") or 0,
        n_blocks=fields.read_size(entry, "count"),
        since_seconds=fields.read_number(entry, "since"),
    )
