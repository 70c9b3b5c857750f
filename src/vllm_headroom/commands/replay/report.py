"""What was found, in words for people and as the one object of `replay --json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom.derive.leak.location import PLACES
from vllm_headroom.derive.leak.shape import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.model import HostMemory, called
from vllm_headroom.trace.course import Course, Interval, Moment
from vllm_headroom.trace.entries import host_entry, unnamed
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import duration, instant, size

WORTH_A_WORD: Final = 0.01
"""A block or two may be late; from here on HeadroomKvBlocksLeak looks whether it grows."""

MOST_INTERVALS: Final = 5
"""What a person reads; --json has them all."""


def verdict(watch: Watch) -> Iterator[str]:
    """Yield the lines to show: the span, then each GPU, then each host role."""
    if not watch.samples:
        yield "The trace has no samples."
        return
    begin, end = watch.span
    yield f"{watch.samples} samples over {duration(end - begin)}, {instant(begin)} to {instant(end)}."
    for index, uuid, course in watch.gpus:
        name = f"GPU {index}" if uuid == unnamed(index) else f"GPU {index} ({uuid})"
        yield from _series(name, course, begin, end)
    for role, course in watch.host:
        yield from _series(f"Host memory of {role}", course, begin, end)
    if watch.memory is not None:
        yield from _host(watch.memory)
    yield from _rest(watch)
    if not watch.gpus:
        yield "No GPU of the engine's was seen."


def _host(memory: HostMemory) -> Iterator[str]:
    """Yield how full the host memory was, and what the kernel did about it."""
    if memory.used_bytes is not None:
        of = "" if memory.limit_bytes is None else f" of {size(memory.limit_bytes)}"
        yield f"Host memory: at most {size(memory.used_bytes)}{of} in use."
    if memory.oom_kills:
        yield f"The kernel killed for want of host memory, processes in all: {memory.oom_kills}."


def _rest(watch: Watch) -> Iterator[str]:
    """Yield what each sleep kept, and what no request held of a KV cache."""
    for gpu, sleeps in watch.residues.items():
        kept = tuple(sleeps.values())
        grown = "" if len(kept) == 1 else f" in the first sleep, {size(kept[-1])} in the last of {len(kept)}"
        yield f"{called(*gpu)}, asleep: kept {size(kept[0])}{grown}."
    for (model, engine), ratio in watch.stranded.items():
        if ratio >= WORTH_A_WORD:
            yield f"{model}, engine {engine}: idle, at most {ratio:.0%} of its KV cache was held by no request."


def _series(name: str, course: Course, begin: float, end: float) -> Iterator[str]:
    if course.growing or course.leaking:
        yield ""
    yield f"{name}: {_told(course, end - begin)}; {course.state} at the end."
    yield from _intervals("early warning", course.growing)
    yield from _intervals("alarm", course.leaking)
    if course.first is not None:
        yield f"  at the first alarm, {duration(course.first.seconds - begin)} after the trace begins:"
        yield from _moment(course.first)
    if course.last is not None and course.last is not course.first:
        yield f"  at the last, {instant(course.last.seconds)}:"
        yield from _moment(course.last)


def _told(course: Course, span_seconds: float) -> str:
    """Return whether it leaks; where nothing was seen, only of a trace in which a leak would have been."""
    if course.first is not None:
        return "LEAKING"
    if course.growing:
        return "only early warnings, no alarm"
    if span_seconds < LEAKING_SECONDS:
        least = f"{GROWING_SECONDS / 60:.0f} min for an early warning, about {LEAKING_SECONDS / 60:.0f} for an alarm"
        return f"cannot be told from {duration(span_seconds)}, growth has to last {least}"
    return "no leak" if course.settled else "cannot be told, the detector never had enough readings under load"


def _intervals(name: str, intervals: tuple[Interval, ...]) -> Iterator[str]:
    for begin, end in intervals[:MOST_INTERVALS]:
        until = "to the end" if end is None else f"to {instant(end)}, {duration(end - begin)}"
        yield f"  {name:<14} {instant(begin)} {until}"
    if len(intervals) > MOST_INTERVALS:
        yield f"  {name:<14} and {len(intervals) - MOST_INTERVALS} times more"


def _moment(moment: Moment) -> Iterator[str]:
    if moment.bytes_per_second is not None:
        yield f"    how fast     {_rate(moment)}"
    if moment.by_requests is not None:
        yield f"    driven by    {'requests' if moment.by_requests else 'time'}"
    if moment.location is not None:
        yield f"    in           {PLACES[moment.location]}"
    if moment.leaked_bytes is not None:
        yield f"    how much     {size(moment.leaked_bytes)} since it began"
    if moment.time_to_oom_seconds is not None:
        least = moment.time_to_oom_seconds_lower
        bound = "" if least is None else f", {duration(least)} at the least"
        yield f"    time to OOM  {duration(moment.time_to_oom_seconds)}{bound}"


def _rate(moment: Moment) -> str:
    text = f"{size(moment.bytes_per_second or 0.0)}/s"
    if moment.bytes_per_second_lower is not None and moment.bytes_per_second_upper is not None:
        text += f" (95 %: {size(moment.bytes_per_second_lower)}/s to {size(moment.bytes_per_second_upper)}/s)"
    if moment.bytes_per_request is not None:
        text += f", {size(1000 * moment.bytes_per_request)} per thousand requests"
    return text


def document(watch: Watch) -> dict[str, Any]:
    """Return the object; times are the trace's, None is what is unknown."""
    begin, end = watch.span
    return {
        "samples": watch.samples,
        "span_seconds": end - begin,
        "gpus": [_gpu(index, uuid, course) for index, uuid, course in watch.gpus],
        "host": [
            {
                "process": role,
                "state": course.state,
                "leaking_intervals": course.leaking,
                "first_leaking": _figures(course.first),
            }
            for role, course in watch.host
        ],
        "host_memory": None if watch.memory is None else host_entry(watch.memory),
        "sleeps": [
            {"gpu": int(gpu), "uuid": uuid, "residue_bytes": list(sleeps.values())}
            for (gpu, uuid), sleeps in watch.residues.items()
        ],
        "stranded": [
            {"model_name": model, "engine": engine, "most_ratio": ratio}
            for (model, engine), ratio in watch.stranded.items()
        ],
    }


def _gpu(index: int, uuid: str, course: Course) -> dict[str, Any]:
    return {
        "gpu": index,
        "uuid": None if uuid == unnamed(index) else uuid,
        "state": course.state,
        "growing_intervals": course.growing,
        "leaking_intervals": course.leaking,
        "first_leaking": _figures(course.first),
        "last_leaking": _figures(course.last),
    }


def _figures(moment: Moment | None) -> dict[str, float | None] | None:
    if moment is None:
        return None
    figures = asdict(moment)
    del figures["by_requests"]
    return {"t": figures.pop("seconds"), **figures}
