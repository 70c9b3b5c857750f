"""What is to be told of a load that is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.load.growth import growth, watched
from vllm_headroom.commands.load.observed import Observed
from vllm_headroom.commands.load.order import Order
from vllm_headroom.commands.load.report import Kind, Memory, Report
from vllm_headroom.commands.load.run import Step
from vllm_headroom.commands.load.sampling import Sampling, ended
from vllm_headroom.model import Failure
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.replay import Watch
from vllm_headroom.vocabulary import Source

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
