"""What was found, as the one object of `replay --json`."""

from __future__ import annotations

from typing import Any

from vllm_headroom.trace.course import Course, Moment
from vllm_headroom.trace.entries import unnamed
from vllm_headroom.trace.replay import Watch


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
                "first_leaking": _moment(course.first),
            }
            for role, course in watch.host
        ],
    }


def _gpu(index: int, uuid: str, course: Course) -> dict[str, Any]:
    return {
        "gpu": index,
        "uuid": None if uuid == unnamed(index) else uuid,
        "state": course.state,
        "growing_intervals": course.growing,
        "leaking_intervals": course.leaking,
        "first_leaking": _moment(course.first),
        "last_leaking": _moment(course.last),
    }


def _moment(moment: Moment | None) -> dict[str, float | None] | None:
    if moment is None:
        return None
    return {
        "t": moment.seconds,
        "bytes_per_second": moment.bytes_per_second,
        "bytes_per_second_lower": moment.bytes_per_second_lower,
        "bytes_per_second_upper": moment.bytes_per_second_upper,
        "bytes_per_request": moment.bytes_per_request,
        "leaked_bytes": moment.leaked_bytes,
        "time_to_oom_seconds": moment.time_to_oom_seconds,
        "time_to_oom_seconds_lower": moment.time_to_oom_seconds_lower,
    }
