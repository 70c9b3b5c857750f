"""The probe's file of one process."""

import json
from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom.model import (
    AllocatorReading,
    Cgroup,
    EngineParts,
    HostReading,
    OomRecord,
    ProbedProcess,
    SchedulerReading,
    Shm,
)
from vllm_headroom.parse import fields
from vllm_headroom.vocabulary import Role

FORMAT: Final = "headroom_probe"
VERSION: Final = 1

LONGEST_TEXT: Final = 200
MOST_DEVICES: Final = 64
"""More than any node has."""

INTERVAL_SECONDS: Final = 5.0
"""The write interval of a file that has none."""


def parse_probe(content: bytes) -> tuple[ProbedProcess, str | None] | str:
    """Return the process and the boot id in a file, or what is wrong with the file.

    The folder belongs to the engine's container: one wrong field invalidates the file. Unknown fields are ignored.
    """
    try:
        document = json.loads(content, parse_constant=fields.refuse_number)
        if type(document) is not dict or document.get(FORMAT) != VERSION:
            return f"no file of a probe of version {VERSION}"
        return _read_process(document), _read_label(document, "boot_id")
    except fields.WrongFieldError as wrong:
        return str(wrong)
    except RecursionError:
        return "not JSON of a probe: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"[:LONGEST_TEXT]


def _read_process(document: Mapping[str, Any]) -> ProbedProcess:
    devices = fields.read_each(document, "devices", _read_device) or ()
    if len(devices) > MOST_DEVICES:
        raise fields.WrongFieldError("devices", len(devices), f"at most {MOST_DEVICES} entries")
    pid, written_at_seconds = int(_read_needed(document, "pid")), _read_needed(document, "t")
    name = fields.read_text(document, "role")
    interval_seconds = fields.read_number(document, "interval_seconds")
    oom = fields.read_within(document, "oom", _read_oom)
    return ProbedProcess(
        pid=pid,
        started_at_seconds=_read_needed(document, "started_at"),
        since_boot_seconds=fields.read_number(document, "started_since_boot"),
        written_at_seconds=written_at_seconds,
        interval_seconds=INTERVAL_SECONDS if interval_seconds is None else interval_seconds,
        role=next((role for role in Role if role == name), Role.OTHER),
        stopped=_read_label(document, "stopped"),
        data_parallel_rank=fields.read_size(document, "data_parallel_rank"),
        vllm_version=_read_label(document, "vllm"),
        devices=devices,
        parts=fields.read_within(document, "parts", _read_parts),
        scheduler=fields.read_within(document, "scheduler", _read_scheduler),
        host=fields.read_within(
            document,
            "host",
            lambda host: HostReading(
                cgroup=fields.read_within(host, "cgroup", _read_cgroup),
                shm=fields.read_within(host, "shm", _read_shm),
            ),
        ),
        oom=None
        if oom is None or oom.at_seconds > written_at_seconds
        else oom,  # it would end every later run
    )


def _read_needed(entry: Mapping[str, Any], field: str) -> float:
    value = fields.read_number(entry, field)
    if value is None:
        raise fields.WrongFieldError(field, None, "a number, 0 or more")
    return value


def _read_label(entry: Mapping[str, Any], field: str) -> str | None:
    value = fields.read_text(entry, field)
    return None if value is None else value[:LONGEST_TEXT]


def _read_device(entry: dict[str, Any], _place: int) -> AllocatorReading:
    uuid = _read_label(entry, "uuid")
    if uuid is None:
        raise fields.WrongFieldError("uuid", None, "the UUID of a device")
    return AllocatorReading(
        uuid=uuid,
        **_read_bytes(entry, "total", "allocated", "reserved", "inactive_split"),
        retries=fields.read_size(entry, "retries"),
        ooms=fields.read_size(entry, "ooms"),
    )


def _read_parts(entry: dict[str, Any]) -> EngineParts:
    return EngineParts(
        **_read_bytes(entry, "weights", "kv_cache", "cuda_graphs", "activation_peak", "requested"),
        asleep=fields.read_truth(entry, "asleep"),
        pool=fields.read_within(entry, "pool", _read_parts),
    )


def _read_scheduler(entry: dict[str, Any]) -> SchedulerReading:
    """Read the scheduler's values; vLLM keeps one block of the pool for itself."""
    total, free, live = (
        fields.read_size(entry, f"kv_blocks_{name}") for name in ("total", "free", "live")
    )
    tokens, block, usable = (
        fields.read_size(entry, "kv_tokens_live"),
        fields.read_size(entry, "block_size"),
        total or 0,
    )
    stranded = filled = None
    if usable > 1 and free is not None and live is not None:
        stranded = max(0.0, 1 - (free + live) / (usable - 1))
    if usable > 1 and tokens is not None and block:
        filled = min(1.0, tokens / (block * (usable - 1)))
    return SchedulerReading(
        steps_total=fields.read_size(entry, "steps_total"),
        max_num_seqs=fields.read_size(entry, "max_num_seqs"),
        kv_stranded_ratio=stranded,
        kv_token_ratio=filled,
    )


def _read_bytes(entry: Mapping[str, Any], *names: str) -> dict[str, int | None]:
    """Return sizes under their fields' names with the unit: `total` becomes `total_bytes`."""
    return {f"{name}_bytes": fields.read_size(entry, name) for name in names}


def _read_cgroup(entry: dict[str, Any]) -> Cgroup | None:
    used, cache, limit, kills = (
        fields.read_size(entry, name) for name in ("used", "file", "limit", "oom_kills")
    )
    if used is None:
        return None
    return Cgroup(
        identity="probe",
        used_bytes=used,
        cache_bytes=cache or 0,
        limit_bytes=limit,
        oom_kills=kills,
    )


def _read_shm(entry: dict[str, Any]) -> Shm | None:
    used_bytes, limit_bytes = fields.read_size(entry, "used"), fields.read_size(entry, "limit")
    if used_bytes is None or limit_bytes is None:
        return None
    return Shm(total_bytes=limit_bytes, free_bytes=limit_bytes - used_bytes)


def _read_oom(entry: dict[str, Any]) -> OomRecord:
    return OomRecord(
        at_seconds=_read_needed(entry, "t"),
        seen=fields.read_size(entry, "seen"),
        uuid=_read_label(entry, "uuid"),
        **_read_bytes(entry, "asked", "free", "allocated", "reserved"),
    )
