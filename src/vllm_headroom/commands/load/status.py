"""What is to be told of a load that is over, from its samples and its trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.load.observed import Observed
from vllm_headroom.commands.load.options import Order
from vllm_headroom.commands.load.report import Growth, Kind, LeakVerdict, Memory, Report
from vllm_headroom.commands.load.run import Step
from vllm_headroom.commands.load.sampling import Sampling, ended
from vllm_headroom.derive.leak.shape import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.model import Failure
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.read import recorded
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import LeakState, Source

NOT_CHOSEN: Final = "it cannot be told which of them are the engine's: name them with --gpus"


def report_of(order: Order, model: str, steps: tuple[Step, ...], sampling: Sampling, *, stopped: bool) -> Report:
    """Return what is to be told; a trace that cannot be read back costs the verdicts on growth only."""
    unread = list(_unread(sampling, order))
    try:
        watch = watched(order.trace)
    except BadInput as error:
        watch = Watch()
        unread.append(f"the trace: {error}")
    return Report(
        target=str(order.url),
        model=model,
        asked=str(order),
        steps=steps,
        memory=tuple(_memory(sampling.whole, watch)),
        whole=sampling.whole,
        ended=ended(sampling.first, sampling.last),
        unread=tuple(unread),
        trace=str(order.trace),
        samples=sampling.samples,
        stopped=stopped,
    )


def _memory(observed: Observed, watch: Watch) -> Iterator[Memory]:
    begin, end = watch.span
    courses = {uuid: course for _, uuid, course in watch.gpus} | {str(role): course for role, course in watch.host}
    finished = observed.engine(catalog.ENGINE_FINISHED)
    for kind, spans in ((Kind.GPU, observed.held), (Kind.HOST, observed.host)):
        for labels, span in sorted(spans.items()):
            yield Memory(
                kind=kind,
                name=labels[0],
                uuid=labels[-1] if kind is Kind.GPU else "",
                span=span,
                growth=growth(courses.get(labels[-1], Course()), end - begin),
                finished=None if finished is None else finished.grown,
            )


def _unread(sampling: Sampling, order: Order) -> Iterator[str]:
    for source, (count, failure) in sampling.failures.items():
        why = f"{order.page} ({failure.reason})" if source is Source.ENGINE else failure.message
        yield f"{source} in {count} of {sampling.samples} samples: {why}"
    last = sampling.last
    if last is None or isinstance(last.gpus, Failure):
        return
    if last.gpus and all(gpu.attribution is None for gpu in last.gpus):
        yield f"nvml: {NOT_CHOSEN}"


def watched(trace: Path) -> Watch:
    """Return what the detector says of a trace; raises BadInput where it cannot be read."""
    watch = Watch()
    for snapshot in recorded(str(trace)):
        watch.step(snapshot)
    return watch


def growth(course: Course, span_seconds: float) -> Growth:
    """Return what a course over so many seconds amounts to; a short one that saw nothing is no proof of anything."""
    if course.leaking:
        moment = course.last
        per_request = None if moment is None else moment.bytes_per_request
        reason = "even growth that load does not explain"
        return Growth(verdict=LeakVerdict.LEAKING, state=course.state, reason=reason, bytes_per_request=per_request)
    if course.growing:
        reason = "growth that load does not explain, not yet for long enough to call it a leak"
        return Growth(verdict=LeakVerdict.GROWING, state=course.state, reason=reason)
    if course.state is LeakState.STABLE and span_seconds >= LEAKING_SECONDS:
        return Growth(verdict=LeakVerdict.NO_LEAK, state=course.state, reason="no growth that load does not explain")
    return Growth(verdict=LeakVerdict.CANNOT_TELL, state=course.state, reason=_unknown(course.state, span_seconds))


def _unknown(state: LeakState, span_seconds: float) -> str:
    if span_seconds < LEAKING_SECONDS:
        return (
            f"{duration(span_seconds)} is too short, an early warning takes {GROWING_SECONDS / 60:.0f} minutes of"
            f" growth or more and an alarm about {LEAKING_SECONDS / 60:.0f}"
        )
    return f"the detector ended in state {state}"
