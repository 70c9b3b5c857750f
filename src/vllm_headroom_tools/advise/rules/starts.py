"""Rules on starts, crashes, host memory and other processes on the GPU."""

from math import floor, inf
from statistics import median
from typing import Final

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES, describe_leftover
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import Ending
from vllm_headroom.units import MIB, format_instant, format_size
from vllm_headroom.vocabulary import EndCause, Sureness
from vllm_headroom_tools.advise.facts import AIM_BYTES, Facts, Origin
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Evidence,
    drop_none,
    list_evidence,
    lower_option,
)
from vllm_headroom_tools.advise.rules.capacity import (
    HIGHEST_UTILIZATION,
    change_share,
    has_run_short,
    split_model,
    take_less,
)
from vllm_headroom_tools.advise.settings import Flag

HOST_LOW_RATIO: Final = 0.05
"""Ours: with less than a twentieth of the limit left, one request with a large video can be the last."""

FAILED_STARTS: Final = 2
"""Ours: a single one may be an operator who stopped it."""

LEAST_SHM_BYTES: Final = 256 * MIB
"""vLLM's largest queue between its processes takes 240 MiB (as in preflight)."""

LOADED_RATIO: Final = 0.5
"""Ours: an engine that held half of the GPU had loaded its model."""


def find_failing_starts(facts: Facts) -> Advice | None:
    """Fit where at least FAILED_STARTS exited before the engine served.

    With less than LOW_BYTES left, or on a GPU that others use, the changes are those of the runbooks' README, branch A.
    With room left after the model was loaded, vLLM found none for its KV cache: "No available memory for the cache
    blocks", or a cache too small for the longest request. Before that, memory is not the cause.
    """
    starts = facts.failed_starts
    if len(starts) < FAILED_STARTS:
        return None
    rooms, cause, remark = (
        _list_rooms(starts),
        Cause.START_UP,
        'vLLM\'s log shows the step: look for "memory" in it.',
    )
    usable = min((gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes), default=inf)
    loaded = tuple(start for start in starts if _find_held(start) >= LOADED_RATIO * usable)
    if median(map(_find_others, starts)) > NEIGHBOUR_BYTES:
        summary, changes = (
            "The engine exits while it starts, on a GPU that others already use.",
            _avoid_others(facts),
        )
    elif (full := _advise_on_shared_memory(facts, starts)) is not None or not (
        rooms or len(loaded) >= FAILED_STARTS
    ):
        return full
    elif min(rooms, default=LOW_BYTES) < LOW_BYTES:
        summary, changes = (
            "The engine runs out of GPU memory while it starts.",
            _shrink_engine(facts),
        )
    elif len(loaded) >= FAILED_STARTS:
        cause, starts = Cause.MODEL_DOES_NOT_FIT, loaded
        summary = "The engine loads its model and exits before it serves, with GPU memory left."
        changes = drop_none(_raise_share(facts, loaded), split_model(facts))
        remark = "vllm-headroom plan computes what fits; a lower --max-model-len is enough where vLLM's log says so."
    else:
        summary, remark = (
            "The engine exits early in its start, with GPU memory left.",
            "No option that sizes memory affects it.",
        )
        look = "Read vLLM's log for NCCL, CUDA and the driver, and the kernel's log for an Xid (dmesg -T | grep -i xid)"
        changes = (Change(text=look, cost="none to this engine"),)
    evidence = _list_start_evidence(starts)
    return Advice(cause=cause, summary=summary, evidence=evidence, changes=changes, remark=remark)


def _advise_on_shared_memory(facts: Facts, starts: tuple[Ending, ...]) -> Advice | None:
    """Fit where /dev/shm had less room than vLLM's largest queue between its processes."""
    host = facts.host
    if host is None or host.shm_limit_bytes is None or host.shm_used_bytes is None:
        return None
    room_bytes = host.shm_limit_bytes - host.shm_used_bytes
    if room_bytes >= LEAST_SHM_BYTES:
        return None
    limit = format_size(host.shm_limit_bytes)
    room = list_evidence(
        ("shm_room_bytes", float(max(0, room_bytes)), f"{{}} of the {limit} of /dev/shm were left")
    )
    return Advice(
        cause=Cause.START_UP,
        summary="The engine exits while it starts, with /dev/shm full.",
        evidence=(*_list_start_evidence(starts), *room),
        changes=(
            Change(
                text="Remove what a killed run left in /dev/shm (vllm_*, psm_*, nccl-*)",
                cost="none to this engine",
            ),
            Change(
                text="Make /dev/shm larger (--shm-size, or an emptyDir with medium: Memory)",
                cost="a restart",
            ),
        ),
    )


def _find_others(start: Ending) -> float:
    return max((gpu.last_other_bytes or 0 for gpu in start.gpus), default=0)


def _find_held(start: Ending) -> float:
    return max((gpu.last_engine_bytes or 0 for gpu in start.gpus), default=0)


def _list_rooms(starts: tuple[Ending, ...]) -> list[int]:
    """Return the least room of each start, where known."""
    return [
        start.fullest_gpu.last_room_bytes or 0 for start in starts if start.fullest_gpu is not None
    ]


def _avoid_others(facts: Facts) -> tuple[Change, ...]:
    move = Change(
        text="Find them with nvidia-smi on the node, and have their owner move or stop them; end a left-over process of"
        " this engine with kill",
        cost="none to this engine",
    )
    rooms = [
        min((gpu.first_room_bytes or 0) + (gpu.first_held_bytes or 0) for gpu in known)
        for start in facts.failed_starts
        if (known := [gpu for gpu in start.gpus if gpu.first_room_bytes is not None])
    ]
    usable = [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes]
    if not rooms or not usable or facts.settings.sizes_cache_in_bytes:
        return (move,)
    value = floor((min(rooms) - AIM_BYTES) / max(usable) * 100) / 100
    if facts.settings.gpu_memory_utilization is None and value >= HIGHEST_UTILIZATION:
        return (move,)
    text = f"{format_size(min(rooms))} were free before the start, and vLLM refuses to start with less than its share"
    cost = "a smaller KV cache, or none at all if the model does not fit; a restart"
    share = lower_option(facts, Flag.GPU_MEMORY_UTILIZATION, value, text, cost)
    return drop_none(move, share)


def _shrink_engine(facts: Facts) -> tuple[Change, ...]:
    rooms = _list_rooms(facts.failed_starts)
    lower = (
        take_less(facts, facts.gpus[0], AIM_BYTES - min(rooms)) if rooms and facts.gpus else None
    )
    half, text = (
        (facts.settings.max_num_seqs or 0) // 2,
        "warming up the sampler and the graphs take less",
    )
    fewer = lower_option(
        facts, Flag.MAX_NUM_SEQS, half, text, "in a burst requests wait in the queue; a restart"
    )
    slower = "every token comes slower; a restart"
    eager = Change(
        flag=Flag.ENFORCE_EAGER,
        text="captures no CUDA graphs, if it exits while it captures them",
        cost=slower,
    )
    wider = split_model(facts, "if it exits while it loads the weights, which then do not fit")
    return drop_none(lower, fewer, eager, wider)


def _raise_share(facts: Facts, starts: tuple[Ending, ...]) -> Change | None:
    """Return a larger share where all of these starts left more than AIM_BYTES."""
    rooms, settings = _list_rooms(starts), facts.settings
    if (
        not rooms
        or settings.sizes_cache_in_bytes
        or settings.gpu_memory_utilization is None
        or has_run_short(facts)
    ):
        return None
    least, usable = min(rooms), max(gpu.usable_bytes or 0.0 for gpu in facts.gpus)
    if least <= AIM_BYTES:
        return None
    text = f"{format_size(least)} were left when it exited"
    return change_share(facts, usable, least - AIM_BYTES, text, "less room for bursts; a restart")


def _list_start_evidence(starts: tuple[Ending, ...]) -> tuple[Evidence, ...]:
    return list_evidence(
        ("failed_starts", len(starts), "{} starts exited before they served"),
        ("most_held_bytes", max(map(_find_held, starts)), "it held at most {} of a GPU"),
        ("least_room_bytes", min(_list_rooms(starts), default=None), "at least {} were left"),
        ("most_others_bytes", max(map(_find_others, starts)) or None, "others held {}"),
    )


def find_crash(facts: Facts) -> Advice | None:
    """Fit where an engine left processes over, or crashed at least FAILED_STARTS times with memory left."""
    found = tuple(end for end in find_crashes(facts) if end.fullest_gpu is not None)
    if len(found) < FAILED_STARTS and not any(end.orphan_bytes for end in found):
        return None
    last, times = found[-1], "once," if len(found) == 1 else f"{len(found)} times, the last"
    when = format_instant(last.seconds)
    look = (
        f"Read vLLM's log up to {when} (kubectl logs --previous), and the kernel's log for an Xid"
    )
    room = 0 if last.fullest_gpu is None else last.fullest_gpu.last_room_bytes or 0
    orphans = max(end.orphan_bytes for end in found) or None
    is_sure = orphans or any(
        judge_ending(end)[0].sureness is not Sureness.POSSIBLE for end in found
    )
    what = "crashed" if is_sure else "exited at work, by a crash or on purpose"
    return Advice(
        cause=Cause.CRASH,
        summary=f"The engine {what}, and not because GPU memory ran out.",
        evidence=list_evidence(
            ("crashes", len(found), f"it exited {times} at {when}"),
            ("running", last.running, "{} requests ran just before"),
            ("room_bytes", room, "{} were left then"),
            ("orphan_bytes", orphans, "its left-over processes still held {}"),
        ),
        changes=(Change(text=look, cost="none to this engine"),),
        remark="No option that sizes GPU memory affects it. Planned restarts during requests look the same where no"
        " process was left over.",
    )


def find_crashes(facts: Facts) -> tuple[Ending, ...]:
    """Return the ends of an engine that served, at work or in parts, which the judge calls a crash with memory left."""
    ends = (end for end in facts.ends if end.has_served and (end.running or end.orphan_bytes))
    return tuple(
        end
        for end in ends
        if judge_ending(end)[0].cause is EndCause.CRASH
        and (end.fullest_gpu is None or (end.fullest_gpu.last_room_bytes or 0) >= LOW_BYTES)
    )


def find_host_shortage(facts: Facts) -> Advice | None:
    """Fit where the kernel counted an out-of-memory kill, or the peak left little of the limit."""
    host = facts.host
    if host is None:
        return None
    room_bytes, limit = host.room_bytes, host.limit_bytes
    is_low = room_bytes is not None and limit is not None and room_bytes < HOST_LOW_RATIO * limit
    if not (host.oom_kills or is_low):
        return None
    used = None if limit is None else host.used_bytes
    of = f"at most {{}} of {format_size(limit or 0)} were in use, without the cache of files"
    return Advice(
        cause=Cause.HOST_MEMORY,
        summary="Host memory, not the GPU's, is too small for this engine.",
        evidence=list_evidence(
            (
                "oom_kills",
                host.oom_kills or None,
                f"out-of-memory kills in its container: {host.oom_kills}",
            ),
            ("host_used_bytes", used, of),
            ("shm_used_bytes", host.shm_used_bytes or None, "{} of it in /dev/shm"),
        ),
        changes=(
            Change(
                text="Keep fewer processed images and videos; no gain without any in the traffic",
                cost="more to process again; the default is 4 for each API server and each data-parallel rank",
                flag=Flag.MM_PROCESSOR_CACHE_GB,
                value=1.0,  # ours: a quarter of the default
            ),
            Change(
                text="Keep less on the host where it is configured: offloaded weights, an offloaded KV cache, unused"
                " adapters",
                cost="more of the GPU's memory, or slower where it is fetched again; a restart",
            ),
            Change(text="Raise the container's memory limit", cost="the node's memory; a restart"),
        ),
        remark="Sleep level 1 keeps the weights in host memory: the limit has to hold them as well.",
    )


def find_other_tenant(facts: Facts) -> Advice | None:
    """Fit where others took more than NEIGHBOUR_BYTES during the trace, or hold it and leave less than AIM_BYTES.

    A page has no history, so what others hold now counts. Constant memory of others beside an engine with room is no
    problem (runbook HeadroomNeighbourGrowing, "Do nothing when").
    """
    found = [
        (gpu, others)
        for gpu in facts.gpus
        if (others := gpu.others) is not None
        and others.most > NEIGHBOUR_BYTES
        and (
            facts.origin is Origin.PAGE
            or others.most - others.least > NEIGHBOUR_BYTES
            or (gpu.least_room_bytes is not None and gpu.least_room_bytes < AIM_BYTES)
        )
    ]
    if not found:
        return None
    gpu, others = max(found, key=lambda each: each[1].most)
    needs = [
        0.0
    ]  # AIM_BYTES at peaks, and its share free, without which vLLM refuses to start (worker/utils.py)
    if gpu.least_room_bytes is not None:
        needs.append(AIM_BYTES - gpu.least_room_bytes)
    utilization = facts.settings.gpu_memory_utilization
    if utilization is not None and gpu.usable_bytes is not None:
        needs.append(others.most - (1.0 - utilization) * gpu.usable_bytes)
    share = take_less(facts, gpu, max(needs)) if max(needs) > 0 else None
    now, most = (" now", None) if facts.origin is Origin.PAGE else ("", others.most)
    return Advice(
        cause=Cause.ANOTHER_TENANT,
        summary=f"Another process takes memory of {gpu.display_name}{now}.",
        evidence=list_evidence(
            (
                "others_bytes",
                others.now,
                f"processes that are not the engine's hold {{}} of {gpu.display_name}",
            ),
            ("most_others_bytes", most, f"between {format_size(others.least)} and {{}}"),
            ("least_room_bytes", gpu.least_room_bytes, "{} were left at the highest peak"),
        ),
        changes=drop_none(
            Change(
                text="Find it with nvidia-smi on the node, and have its owner move it to another GPU or stop it",
                cost="none to this engine",
            ),
            share,
        ),
        remark=None
        if share is None
        else "A smaller share for vLLM is right only if both have to stay on this GPU.",
    )


def find_leftovers(facts: Facts) -> Advice | None:
    """Fit where a trace ends with left-over processes of an exited engine on its GPUs; a page names none."""
    evidence = list_evidence(
        *(
            (
                "left_behind_bytes",
                "unknown" if left.used_bytes is None else left.used_bytes,
                f"{gpu.display_name}: {describe_leftover(left)}",
            )
            for gpu in facts.gpus
            for left in gpu.leftovers
        )
    )
    if not evidence:
        return None
    return Advice(
        cause=Cause.LEFT_BEHIND,
        summary="Left-over processes of an exited engine hold GPU memory.",
        evidence=evidence,
        changes=(
            Change(
                text="End it, or reset the GPU if nothing runs any more: vllm-headroom doctor names its pid",
                cost="none to this engine; a reset needs a GPU that nothing else uses",
            ),
        ),
    )
