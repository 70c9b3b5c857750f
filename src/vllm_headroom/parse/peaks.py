"""Parse the peaks that the probe's file for one process contains."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from vllm_headroom.model import (
    PeakReadings,
    SizePeak,
    StepAtError,
    StepFacts,
    WorkPeak,
    WorkPeaks,
)
from vllm_headroom.parse import fields
from vllm_headroom.vocabulary import Work

MOST_SIZES: Final = 64
"""The maximum number of sizes per kind of work. The probe writes a third as many."""

SIZE_FIGURES: Final = 3
"""The number of figures per size: the size, its bytes and its steps."""


def read_peaks(entry: dict[str, Any]) -> PeakReadings:
    """Return the peaks of a process, omitting unknown kinds of work.

    Raises WrongFieldError.
    """
    kinds = fields.read_within(entry, "kinds", _read_works) or ()
    resting = fields.read_within(entry, "resting", dict) or {}
    limits = fields.read_within(entry, "limits", dict) or {}
    return PeakReadings(
        works=kinds,
        resting_allocated_bytes=fields.read_size(resting, "allocated"),
        resting_reserved_bytes=fields.read_size(resting, "reserved"),
        resting_split_bytes=fields.read_size(resting, "inactive_split"),
        batch_tokens=fields.read_size(limits, "batch_tokens"),
        model_tokens=fields.read_size(limits, "model_tokens"),
        max_requests=fields.read_size(limits, "requests"),
        stopped=fields.read_text(entry, "stopped"),
    )


def read_step_at_error(entry: dict[str, Any]) -> StepAtError | None:
    """Return the step in which an error was raised.

    Returns None if its kind of work is unknown.
    """
    name = fields.read_text(entry, "work")
    work = next((work for work in Work if work == name), None)
    return None if work is None else StepAtError(work=work, step=_read_step(entry))


def _read_works(entry: dict[str, Any]) -> tuple[WorkPeaks, ...]:
    """Return the kinds of work that the process has done.

    Raises WrongFieldError for a wrong field.
    """
    works = []
    for work in Work:
        peaks = fields.read_within(entry, work, partial(_read_work, work=work))
        if peaks is not None:
            works.append(peaks)
    return tuple(works)


def _read_work(entry: dict[str, Any], work: Work) -> WorkPeaks:
    """Return the peaks of one kind of work; raise WrongFieldError for a wrong field."""
    sizes = entry.get("sizes")
    if sizes is None:
        sizes = []
    if type(sizes) is not list or len(sizes) > MOST_SIZES:
        raise fields.WrongFieldError("sizes", sizes, f"a list of at most {MOST_SIZES} entries")
    return WorkPeaks(
        work=work,
        sizes=tuple([_read_size_peak(index, figures) for index, figures in enumerate(sizes)]),
        highest=fields.read_within(entry, "highest", _read_peak),
        recent=fields.read_within(entry, "recent", _read_peak),
    )


def _read_size_peak(index: int, figures: object) -> SizePeak:
    """Return one size's peak; raise WrongFieldError unless the entry has all three figures."""
    name = f"sizes[{index}]"
    if type(figures) is not list or len(figures) != SIZE_FIGURES:
        raise fields.WrongFieldError(name, figures, "a size, its bytes and its steps")
    numbered = {f"{name}[{place}]": figure for place, figure in enumerate(figures)}
    size, transient_bytes, steps = (_read_needed(numbered, place) for place in numbered)
    return SizePeak(size=size, transient_bytes=transient_bytes, steps=steps)


def _read_peak(entry: dict[str, Any]) -> WorkPeak:
    return WorkPeak(
        transient_bytes=_read_needed(entry, "bytes"),
        size=_read_needed(entry, "size"),
        step=_read_step(entry),
    )


def _read_step(entry: dict[str, Any]) -> StepFacts:
    """Return the facts about a step; a figure that the probe omits is 0.

    Raises WrongFieldError.
    """
    at_seconds = fields.read_number(entry, "t")
    if at_seconds is None:
        raise fields.WrongFieldError("t", None, "a number, 0 or more")
    counts = {
        name: fields.read_size(entry, name) or 0
        for name in StepFacts.__struct_fields__
        if name != "at_seconds"
    }
    return StepFacts(at_seconds=at_seconds, **counts)


def _read_needed(entry: Mapping[str, Any], field: str) -> int:
    """Return a whole number; raise WrongFieldError if the field is missing or wrong."""
    value = fields.read_size(entry, field)
    if value is None:
        raise fields.WrongFieldError(field, None, "a number, 0 or more")
    return value
