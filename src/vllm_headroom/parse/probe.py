"""What a file of the probe says of its process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom.model import (
    AllocatorReading,
    EngineParts,
    HostBlock,
    OomRecord,
    PoolReading,
    ProbedProcess,
    SchedulerReading,
)
from vllm_headroom.parse.fields import WrongFieldError, each, no_number, number, size, text, truth, within
from vllm_headroom.vocabulary import Role

FORMAT: Final = "headroom_probe"
VERSION: Final = 1

LONGEST_TEXT: Final = 200
MOST_DEVICES: Final = 64
"""More than any node has; what says more is nobody's file."""

INTERVAL_SECONDS: Final = 5.0
"""How often a probe writes that does not say it."""


def parse_probe(content: bytes) -> tuple[ProbedProcess, str | None] | str:
    """Return the process and the boot that a file is of, or what is wrong with the file.

    The folder belongs to the engine's container: one wrong field and nothing of the file is believed. Fields that are
    not known are passed over.
    """
    try:
        document = json.loads(content, parse_constant=no_number)
        if type(document) is not dict or document.get(FORMAT) != VERSION:
            return f"no file of a probe of version {VERSION}"
        return _process(document), _text(document, "boot_id")
    except WrongFieldError as wrong:
        return str(wrong)
    except RecursionError:
        return "not JSON of a probe: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"[:LONGEST_TEXT]


def _process(document: Mapping[str, Any]) -> ProbedProcess:
    devices = each(document, "devices", _device) or ()
    if len(devices) > MOST_DEVICES:
        raise WrongFieldError("devices", len(devices), f"at most {MOST_DEVICES} entries")
    pid, written_at_seconds = int(_needed(document, "pid")), _needed(document, "t")
    interval_seconds, oom = number(document, "interval_seconds"), within(document, "oom", _oom)
    return ProbedProcess(
        pid=pid,
        started_at_seconds=_needed(document, "started_at"),
        since_boot_seconds=number(document, "started_since_boot"),
        written_at_seconds=written_at_seconds,
        interval_seconds=INTERVAL_SECONDS if interval_seconds is None else interval_seconds,
        role=_role(document),
        stopped=_text(document, "stopped"),
        data_parallel_rank=size(document, "data_parallel_rank"),
        vllm_version=_text(document, "vllm"),
        devices=devices,
        parts=within(document, "parts", _parts),
        scheduler=within(document, "scheduler", _scheduler),
        host=within(document, "host", _host),
        oom=None if oom is None or oom.at_seconds > written_at_seconds else oom,  # it would end every life to come
    )


def _needed(entry: Mapping[str, Any], field: str) -> float:
    value = number(entry, field)
    if value is None:
        raise WrongFieldError(field, None, "a number, 0 or more")
    return value


def _text(entry: Mapping[str, Any], field: str) -> str | None:
    value = text(entry, field)
    return None if value is None else value[:LONGEST_TEXT]


def _role(document: Mapping[str, Any]) -> Role:
    name = text(document, "role")
    return next((role for role in Role if role == name), Role.OTHER)


def _device(entry: dict[str, Any], _place: int) -> AllocatorReading:
    uuid = _text(entry, "uuid")
    if uuid is None:
        raise WrongFieldError("uuid", None, "the UUID of a device")
    return AllocatorReading(
        uuid=uuid,
        **_bytes(entry, "total", "allocated", "reserved", "inactive_split"),
        retries=size(entry, "retries"),
        ooms=size(entry, "ooms"),
    )


def _parts(entry: dict[str, Any]) -> EngineParts:
    return EngineParts(
        **_bytes(entry, "weights", "kv_cache", "cuda_graphs", "activation_peak", "requested"),
        asleep=truth(entry, "asleep"),
        pool=within(entry, "pool", lambda pool: PoolReading(**_bytes(pool, "weights", "kv_cache"))),
    )


def _scheduler(entry: dict[str, Any]) -> SchedulerReading:
    return SchedulerReading(steps_total=size(entry, "steps_total"), max_num_seqs=size(entry, "max_num_seqs"))


def _bytes(entry: Mapping[str, Any], *names: str) -> dict[str, int | None]:
    """Return sizes by their fields' names, which say the unit: `total` is `total_bytes`."""
    return {f"{name}_bytes": size(entry, name) for name in names}


def _host(entry: dict[str, Any]) -> HostBlock:
    cgroup = within(entry, "cgroup", dict) or {}
    shm = within(entry, "shm", dict) or {}
    return HostBlock(
        used_bytes=size(cgroup, "used"),
        file_bytes=size(cgroup, "file"),
        limit_bytes=size(cgroup, "limit"),
        oom_kills=size(cgroup, "oom_kills"),
        shm_used_bytes=size(shm, "used"),
        shm_limit_bytes=size(shm, "limit"),
    )


def _oom(entry: dict[str, Any]) -> OomRecord:
    return OomRecord(
        at_seconds=_needed(entry, "t"),
        seen=size(entry, "seen"),
        uuid=_text(entry, "uuid"),
        **_bytes(entry, "asked", "free", "allocated", "reserved"),
    )
