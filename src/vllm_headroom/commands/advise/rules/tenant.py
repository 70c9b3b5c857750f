"""Rules on memory of the engine's GPUs that is not the engine's: what others take, and what an ended one left."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.advise.facts import Extent, Facts, GpuFacts, Origin
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, several
from vllm_headroom.commands.advise.limits import AIM_BYTES
from vllm_headroom.commands.advise.rules.room import take_less
from vllm_headroom.derive.leftovers import described
from vllm_headroom.derive.verdicts import NEIGHBOUR_BYTES
from vllm_headroom.units import size


def another_tenant(facts: Facts) -> Advice | None:
    """Fit where others hold more than NEIGHBOUR_BYTES and took it meanwhile, or leave less than AIM_BYTES.

    On a page nothing is known of before, so that what they hold now is said. What others have held all the time beside
    an engine that has room belongs there (runbook HeadroomNeighbourGrowing, "Do nothing when").
    """
    known = ((gpu, gpu.others) for gpu in facts.gpus if gpu.others is not None)
    found = [(gpu, others) for gpu, others in known if _matters(gpu, others, facts.origin)]
    if not found:
        return None
    gpu, others = max(found, key=lambda each: each[1].most)
    share = _both_stay(facts, gpu, others)
    now = " now" if facts.origin is Origin.PAGE else ""
    return Advice(
        cause=Cause.ANOTHER_TENANT,
        summary=f"Another process takes memory of {gpu.called}{now}.",
        evidence=tuple(_evidence(gpu, others, facts.origin)),
        changes=several(
            Change(
                text="Find it with nvidia-smi on the node, and have its owner move it to another GPU or stop it",
                cost="none to this engine",
            ),
            share,
        ),
        remark=None if share is None else "A smaller share for vLLM is right only where both have to stay on this GPU.",
    )


def _both_stay(facts: Facts, gpu: GpuFacts, others: Extent) -> Change | None:
    """Return the smaller share with which both have room: AIM_BYTES at peaks, and what vLLM wants free to start.

    vLLM refuses to start with less free than its share of the GPU (vllm/v1/worker/utils.py).
    """
    needs = [0.0]
    if gpu.least_room_bytes is not None:
        needs.append(AIM_BYTES - gpu.least_room_bytes)
    utilization = facts.settings.gpu_memory_utilization
    if utilization is not None and gpu.usable_bytes is not None:
        needs.append(others.most - (1.0 - utilization) * gpu.usable_bytes)
    return take_less(facts, gpu, max(needs)) if max(needs) > 0 else None


def _matters(gpu: GpuFacts, others: Extent, origin: Origin) -> bool:
    takes = origin is Origin.PAGE or others.most - others.least > NEIGHBOUR_BYTES
    short = gpu.least_room_bytes is not None and gpu.least_room_bytes < AIM_BYTES
    return others.most > NEIGHBOUR_BYTES and (takes or short)


def _evidence(gpu: GpuFacts, others: Extent, origin: Origin) -> Iterator[Evidence]:
    text = f"processes that are not the engine's hold {size(others.now)} of {gpu.called}"
    yield Evidence("others_bytes", others.now, text)
    if origin is Origin.TRACE:
        most = f"{size(others.most)} at the most, {size(others.least)} at the least"
        yield Evidence("most_others_bytes", others.most, most)
    if gpu.least_room_bytes is not None:
        left = size(gpu.least_room_bytes)
        yield Evidence("least_room_bytes", gpu.least_room_bytes, f"{left} were left at the highest peak")


def left_behind(facts: Facts) -> Advice | None:
    """Fit where at the end of a trace processes on the engine's GPUs serve no engine any more; a page names none."""
    evidence = tuple(_left(facts))
    if not evidence:
        return None
    return Advice(
        cause=Cause.LEFT_BEHIND,
        summary="What is left of an engine that has ended holds GPU memory.",
        evidence=evidence,
        changes=(
            Change(
                text="End it, or where nothing runs any more reset the GPU: vllm-headroom doctor names its pid",
                cost="none to this engine; a reset needs a GPU that nothing else has open",
            ),
        ),
    )


def _left(facts: Facts) -> Iterator[Evidence]:
    for gpu in facts.gpus:
        for leftover in gpu.leftovers:
            known = "unknown" if leftover.used_bytes is None else leftover.used_bytes
            yield Evidence("left_behind_bytes", known, f"{gpu.called}: {described(leftover)}")
