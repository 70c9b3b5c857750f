"""A recorded trace, line by line, to snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

from msgspec import Struct

from vllm_headroom.model import EnginePage, EngineProcess, Failure, Snapshot
from vllm_headroom.parse.fields import WrongFieldError, each, within
from vllm_headroom.trace.entries import engine_of, gpu_of, host_of, process_of
from vllm_headroom.trace.write import HEADER
from vllm_headroom.vocabulary import Reason, Source

(FORMAT,) = HEADER
YEAR_10000: Final = 253_402_300_800
NO_TRACE: Final = f"no trace of this version, whose first line is {json.dumps(HEADER)}"

_GPUS_FAILED: Final = Failure(
    source=Source.NVML, reason=Reason.UNKNOWN, message="the trace has no reading of the GPUs here"
)
_ENGINES_FAILED: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the trace has no reading of the engines here"
)
_PROCESSES_FAILED: Final = Failure(
    source=Source.PROCESS, reason=Reason.UNAVAILABLE, message="the trace has no reading of the processes here"
)


class CutOff(Struct, frozen=True):
    """Stands for the last line of a trace, by its number, where only a part of it was written."""

    line: int


def snapshots(lines: Iterable[bytes]) -> Iterator[Snapshot | CutOff | str]:
    """Yield a snapshot for each sample after the header; at the first line that is wrong, yield why and end.

    Blank lines and further headers are passed over, so that rotated traces can be put together.
    """
    number, rest = 0, iter(lines)
    for number, line in enumerate(rest, start=1):
        record = _record(line)
        if number == 1 and not _is_header(record):
            yield f"line 1: {NO_TRACE}"
            return
        found = record if isinstance(record, str) else _sample(record)
        if isinstance(found, Snapshot):
            yield found
        elif found is not None:
            ended = isinstance(record, str) and not line.endswith(b"\n") and next(rest, None) is None
            yield CutOff(number) if ended else f"line {number}: {found}"
            return
    if number == 0:
        yield f"line 1: {NO_TRACE}"


def _sample(record: dict[str, Any] | None) -> Snapshot | str | None:
    """Return the sample in a record, what is wrong with it, or None where it has none: a blank line, a header."""
    if record is None or _is_header(record):
        return None
    return NO_TRACE if FORMAT in record else snapshot_of(record)


def _is_header(record: object) -> bool:
    return isinstance(record, dict) and record.get(FORMAT) == HEADER[FORMAT]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_JSON: Final = json.JSONDecoder(parse_constant=_no_number)


def _record(line: bytes) -> dict[str, Any] | str | None:
    """Return the object on a line, None for a blank line, or what is wrong with it."""
    try:
        content = str(line, "utf-8").strip()
        if not content:
            return None
        record = _JSON.decode(content)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not JSON of a trace: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"
    return record if isinstance(record, dict) else "not a JSON object"


def snapshot_of(record: Mapping[str, Any]) -> Snapshot | str:
    """Return one sample as the daemon saw it, or what is wrong with it.

    What is absent or null is unknown; a side that is absent or null counts as failed. `t` serves as both clocks. A GPU
    or engine without an index or a name is known by its place in the list.
    """
    try:
        time = _time(record)
        gpus = each(record, "gpus", gpu_of)
        engines = each(record, "engines", engine_of)
        processes = each(record, "processes", process_of)
        host = within(record, "host", host_of)
    except WrongFieldError as wrong:
        return str(wrong)
    if gpus is not None and len({gpu.reading.uuid for gpu in gpus}) < len(gpus):
        return "gpus: the same GPU twice"
    return Snapshot(
        time_seconds=time,
        monotonic_seconds=time,
        engines=_ENGINES_FAILED if engines is None else EnginePage(profile="vllm", engines=engines, inputs=()),
        gpus=_GPUS_FAILED if gpus is None else gpus,
        processes=_known(processes),
        host=host,
    )


def _time(record: Mapping[str, Any]) -> float:
    """Return `t`, which every record has."""
    value = record.get("t")
    if (type(value) is int or type(value) is float) and 0 <= value < YEAR_10000:
        return float(value)
    raise WrongFieldError("t", value, "seconds since the epoch")


def _known(processes: tuple[EngineProcess | None, ...] | None) -> tuple[EngineProcess, ...] | Failure:
    """Return the processes, or a failure where the memory of one is unknown: a sum without it would be a lie."""
    known = tuple(process for process in processes or () if process is not None)
    return _PROCESSES_FAILED if processes is None or len(known) < len(processes) else known
