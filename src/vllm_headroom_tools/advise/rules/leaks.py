"""Rules for memory shortages, and for leaks of memory or cache blocks."""

from collections.abc import Iterable
from math import floor
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.life import causes
from vllm_headroom.derive.life.causes import is_over_budget
from vllm_headroom.derive.verdicts import LOW_BYTES, OVER_BUDGET_SECONDS, STRANDED_RATIO
from vllm_headroom.model import BudgetExcess
from vllm_headroom.units import format_duration, format_instant, format_size
from vllm_headroom.vocabulary import LeakLocation, LeakState
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    EngineFacts,
    Facts,
    FactsSource,
    GpuFacts,
    Leak,
    Shortage,
    Spell,
    StrandedFacts,
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Figure,
    drop_none,
    format_percent,
    list_evidence,
    lower_option,
    name_engine,
)
from vllm_headroom_tools.advise.rules.capacity import change_share, take_less
from vllm_headroom_tools.advise.settings import Flag
from vllm_headroom_tools.history import Moment
from vllm_headroom_tools.versions import FAULTS

# Memory leaks.

RESTART_COST: Final = "a restart: drain the engine first, while another replica serves"
UPGRADE_COST: Final = "a test of another version; a restart"
EVIDENCE_FIRST: Final = (
    "Save the trace and the engine's log first: a report needs them, and a restart deletes them"
)
CHANGE_VERSION: Final = "Upgrade vLLM, or go back to the version before the leak"

DEFRAGMENT: Final = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's environment, unless sleep"
    " mode is on, which refuses it: what grows is fragmented memory that torch has reserved and"
    " cannot use"
)
CHANGE_DRIVER: Final = (
    "Look for it in the release notes of NCCL and of the driver, by the versions in the engine's"
    " log, and try newer ones: it grows outside torch, where neither vLLM nor torch can free it"
)
REPORT_TENSORS: Final = (
    f"{CHANGE_VERSION}; the growth is tensors that nobody frees: report it to vLLM with the trace"
)

CURES: Final[dict[LeakLocation | None, tuple[str, ...]]] = {
    LeakLocation.FRAGMENTATION: (DEFRAGMENT, CHANGE_VERSION),
    LeakLocation.OUTSIDE_TORCH: (CHANGE_DRIVER,),
    LeakLocation.TENSORS: (REPORT_TENSORS,),
    None: (CHANGE_VERSION,),
}
"""For each location of the growth, the fixes to try, in this order. The key None means that the
location is unknown.
"""


FIND_HOLDER: Final = Change(
    text=(
        "See with nvidia-smi (AMD: amd-smi process) on the node, twice within some minutes, which"
        " process grows; if it is not the engine, a restart of the engine does not help"
    ),
    cost="none",
)


class WorstLeak(Struct, frozen=True, kw_only=True):
    """The fastest ongoing leak or, if none is ongoing, the fastest ended leak."""

    # The names of all series that leaked, for the summary.
    names: str
    # The name of the series with the worst leak.
    name: str
    leak: Leak
    # The latest figures of this series' alarm.
    alarm: Moment


def find_gpu_leak(facts: Facts) -> Advice | None:
    """Judge the growth of the engine's GPU memory (docs/leaks.md).

    The rule applies if the leak detector raised an alarm on a GPU. The rule proposes a restart
    before memory runs out. The second proposal depends on where memory grows. No vLLM option stops
    a leak. If the growing process is unknown, the first step is to find that process. Returns None
    if the rule does not apply.
    """
    worst = _pick_worst_leak((gpu.display_name, gpu.leak) for gpu in facts.gpus)
    if worst is None:
        return None
    location = worst.alarm.location
    summary = f"The engine leaks GPU memory on {worst.names}."
    first_changes: tuple[Change, ...] = ()
    unknown_names = {gpu.display_name for gpu in facts.gpus if not gpu.is_holder_known}
    # The probe measures only the engine's memory. If the growth's location is known, the growth is
    # therefore in the engine.
    if worst.name in unknown_names and location is None:
        summary = (
            f"{worst.names} fills, by whom is not known; every process on the card is affected."
        )
        first_changes = (FIND_HOLDER,)
    effect = "fixes a leak"
    if location is LeakLocation.FRAGMENTATION:
        effect = "of vLLM fixes fragmentation"
    return Advice(
        cause=Cause.GPU_LEAK,
        summary=summary,
        evidence=_list_leak_evidence(worst),
        changes=(
            *first_changes,
            *_list_remedies(
                worst, usual_time="in a quiet hour", end="out of memory", cures=CURES[location]
            ),
        ),
        remark=f"No option {effect}: a smaller share for vLLM only delays the next restart.",
    )


def find_straight_growth(facts: Facts) -> Advice | None:
    """Judge growth that filled a GPU within minutes.

    The rule applies if memory grew linearly under constant load before an exit. The leak detector
    must not have raised an alarm, because the growth was too fast for it. The proposed fix is not a
    vLLM option, because no option stops a leak. Returns None if the rule does not apply.
    """
    gpus = [causes.find_straight_growth_gpu(end) for end in facts.ends]
    # Start with the latest exit, because the operator wants to know about that exit.
    for gpu in reversed(gpus):
        if gpu is not None and gpu.straight_growth is not None:
            growth = gpu.straight_growth
            duration = format_duration(growth.seconds)
            return Advice(
                cause=Cause.GPU_LEAK,
                summary=f"The engine grew until {gpu.display_name} was full, under a level load.",
                evidence=list_evidence(
                    (
                        "bytes_per_second",
                        growth.bytes_per_second,
                        f"{{}} per second in a straight line, for {duration}",
                    ),
                    ("exits", sum(1 for gpu in gpus if gpu is not None), "exits after such: {}"),
                ),
                changes=(Change(text=CHANGE_VERSION, cost=UPGRADE_COST),),
                remark=(
                    "No option fixes a leak: a smaller share for vLLM only delays the next exit."
                ),
            )
    return None


def find_host_leak(facts: Facts) -> Advice | None:
    """Judge the growth of host memory in the engine's processes.

    The rule applies if the leak detector raised an alarm on a process role. The rule proposes a
    restart before the kernel kills the engine, followed by an upgrade. If a known leak affects this
    role, the upgrade is to the fixed version. Returns None if the rule does not apply.
    """
    worst = _pick_worst_leak((host.process, host.leak) for host in facts.hosts)
    if worst is None:
        return None
    held_bytes = None
    for host in facts.hosts:
        if host.process == worst.name:
            held_bytes = host.held_bytes
            break
    return Advice(
        cause=Cause.HOST_LEAK,
        summary=f"The engine's processes leak host memory: {worst.names}.",
        evidence=(
            *_list_leak_evidence(worst),
            *list_evidence(("held_bytes", held_bytes, f"{worst.name} holds {{}} of host memory")),
        ),
        changes=_list_remedies(
            worst,
            usual_time="before the container's memory limit is reached",
            end="a kill by the kernel",
            cures=_list_known_cures(facts, worst.name) or ["Upgrade vLLM"],
        ),
        remark="No option that sizes GPU memory affects it.",
    )


def _list_known_cures(facts: Facts, role: str) -> list[str]:
    """Return the fixes for known leaks in this role and version of vLLM.

    Returns an empty list if the version is unknown or has no known leak.
    """
    version = facts.settings.version
    if not version:
        return []
    faults = [fault for fault in FAULTS if fault.role == role]
    return [fault.advice for fault in faults if fault.is_in(version)]


def _pick_worst_leak(leaks: Iterable[tuple[str, Leak]]) -> WorstLeak | None:
    """Return the worst leak among these named series.

    Returns None if no series had an alarm.
    """
    names = []
    worst = None
    worst_rank = (False, 0.0)
    for name, leak in leaks:
        if leak.alarm is None:
            continue
        names.append(name)
        # An ongoing leak is worse than an ended leak. If both are ongoing or both have ended, the
        # faster leak is worse.
        rank = (leak.ended_seconds is None, leak.alarm.bytes_per_second or 0.0)
        if worst is None or rank > worst_rank:
            worst = WorstLeak(names=name, name=name, leak=leak, alarm=leak.alarm)
            worst_rank = rank
    if worst is None:
        return None
    all_names = ", ".join(names)
    end_seconds = worst.leak.ended_seconds
    if end_seconds is not None:
        all_names += f"; it ended at {format_instant(end_seconds)}, as with a restart"
    return WorstLeak(names=all_names, name=worst.name, leak=worst.leak, alarm=worst.alarm)


def _list_remedies(
    worst: WorstLeak, *, usual_time: str, end: str, cures: Iterable[str]
) -> tuple[Change, ...]:
    """Return the changes for a leak.

    If the leak has not ended, a restart comes before the `cures`. `end` names what happens if the
    leak goes on. `usual_time` says when to restart if the remaining time is unknown.
    """
    upgrades = tuple(Change(text=cure, cost=UPGRADE_COST) for cure in cures)
    if worst.leak.ended_seconds is not None:
        # The leak has ended, probably because of a restart.
        return upgrades
    # The lower bound of the remaining time, if known, is the safe choice.
    seconds_left = worst.alarm.time_to_oom_seconds_lower
    if seconds_left is None:
        seconds_left = worst.alarm.time_to_oom_seconds
    time = usual_time
    if seconds_left is not None:
        time = f"within {format_duration(seconds_left)}, the lower bound of the time to {end}"
    restart = Change(text=f"Restart the engine {time}. {EVIDENCE_FIRST}", cost=RESTART_COST)
    return (restart, *upgrades)


def _list_leak_evidence(worst: WorstLeak) -> tuple[Figure, ...]:
    """Return the figures from the worst leak's alarm."""
    alarm = worst.alarm
    state = worst.leak.state
    thousand_requests = format_size(1000 * (alarm.bytes_per_request or 0.0))
    place = "" if alarm.location is None else PLACES[alarm.location]
    # Once the alarm is over, the remaining time is meaningless.
    is_current = state is LeakState.LEAKING
    seconds_left = alarm.time_to_oom_seconds if is_current else None
    earliest_seconds = alarm.time_to_oom_seconds_lower if is_current else None
    return list_evidence(
        ("series", worst.name, f"the leak detector's alarm on {worst.name}; {state} now"),
        ("location", alarm.location, f"it grows in {place}, by the probe inside the engine"),
        ("bytes_per_second", alarm.bytes_per_second, "{} per second"),
        (
            "bytes_per_request",
            alarm.bytes_per_request,
            f"{thousand_requests} per thousand requests",
        ),
        ("leaked_bytes", alarm.leaked_bytes, "{} since it began"),
        ("time_to_oom_seconds_lower", earliest_seconds, "out of memory in {} at the earliest"),
        ("time_to_oom_seconds", seconds_left, "out of memory likely in about {}"),
    )


# KV cache block leaks.

LOST_RATIO: Final = 0.01
"""Blocks are lost if more of the KV cache is in use without requests. The share must also have
risen LOST_RISES times (alert HeadroomKvBlocksLeak).
"""

LOST_RISES: Final = 3
"""How many times the share must have risen between idle periods. See alert HeadroomKvBlocksLeak."""


def find_kv_block_leak(facts: Facts) -> Advice | None:
    """Judge blocks of the KV cache that stay in use while no request runs.

    The rule concerns the cache share in use while the engine is idle. The rule applies if this
    share exceeds STRANDED_RATIO. The rule also applies if this share exceeds LOST_RATIO and has
    risen LOST_RISES times from one idle period to the next. The first proposal is a restart. The
    second proposal is an upgrade, or running without the KV connector, which may lose blocks in
    failed transfers. Returns None if the rule does not apply.
    """
    leaking_engines = []
    evidence: list[Figure] = []
    for engine in facts.engines:
        if engine.stranded is not None and _loses_blocks(engine.stranded):
            leaking_engines.append(engine)
            evidence += _list_stranded_evidence(engine.stranded)
    if not leaking_engines:
        return None
    return Advice(
        cause=Cause.KV_BLOCK_LEAK,
        summary=f"Blocks of the KV cache are lost: {_name_engines(facts, leaking_engines)}.",
        evidence=tuple(evidence),
        changes=(
            Change(text=f"Restart the engine in a quiet hour. {EVIDENCE_FIRST}", cost=RESTART_COST),
            Change(
                text=(
                    "Upgrade vLLM; where a KV connector transfers blocks, look in the log for"
                    " transfers that failed, and try without it"
                ),
                cost="a test of another version or setting; a restart",
            ),
        ),
        remark="GPU memory does not run out: the cache only holds fewer requests, in the end none.",
    )


def _loses_blocks(stranded: StrandedFacts) -> bool:
    """Return whether the share in use while idle is too large or rose too often."""
    if stranded.ratio > STRANDED_RATIO:
        return True
    return stranded.rises >= LOST_RISES and stranded.ratio > LOST_RATIO


def _name_engines(facts: Facts, engines: Iterable[EngineFacts]) -> str:
    return ", ".join(name_engine(facts, engine) for engine in engines)


def _list_stranded_evidence(stranded: StrandedFacts) -> tuple[Figure, ...]:
    """Return the cache share that stays in use, and how often it has risen.

    The number of rises is omitted if the share never rose.
    """
    first_percent = format_percent(stranded.first_ratio)
    return list_evidence(
        (
            "stranded_ratio",
            stranded.ratio,
            "{} of the KV cache stayed in use a minute after the last request",
        ),
        (
            "rises",
            stranded.rises or None,
            f"the share rose {{}} times from one idle time to the next, from {first_percent} on",
        ),
    )


# Shortages not caused by a leak.

SHORTAGE_CAUSES: Final = {
    # vLLM's share leaves too little for the memory outside it (DESIGN.md, 7). The memory outside
    # the share holds the CUDA context, NCCL, and kernels that load late.
    Shortage.LEVEL: (Cause.CONFIGURATION_OVERSHOOT, "vLLM takes more of {} than it can spare"),
    # The allocator does not return memory that a request once needed. The allocator's usage
    # therefore never falls below the highest need so far (DESIGN.md, 20).
    Shortage.RISEN: (Cause.CHRONIC, "Memory of {} filled up after the start"),
    Shortage.PEAK: (Cause.BURST, "Bursts nearly fill {}"),
}
"""The cause of each kind of shortage, and the beginning of its summary. In the summary, {} is
replaced by the GPU.
"""

SHORTAGE_REMARK: Final = (
    "The share in use means little, since vLLM takes most of the GPU at its start;"
    " what is left counts."
)
BURST_REMARK: Final = (
    "A lower share for vLLM makes room for bursts and shrinks the KV cache;"
    " a full KV cache is no shortage."
)


def find_over_budget(facts: Facts) -> Advice | None:
    """Judge an engine that has exceeded its budget ever since its first traffic.

    The excess is the memory beyond its budget that the engine holds at rest. The rule applies in
    the same cases as the sidecar's verdict:

    - Because of the excess, little memory was left for OVER_BUDGET_SECONDS.
    - The excess explains an exit.

    The rule proposes reducing vLLM's share by the excess. Returns None if the rule does not apply.
    """
    gpus = _list_over_budget(facts)
    if not gpus:
        return None
    # Use the GPU with the largest excess. The option is the same for all GPUs.
    gpu, excess = max(gpus, key=lambda pair: pair[1].excess_bytes)
    exits = sum(1 for end in facts.ends if is_over_budget(end))
    size = format_size(excess.excess_bytes)
    lower_share = change_share(
        facts,
        excess.total_bytes,
        -excess.excess_bytes,
        f"gives back the {size} that the engine holds beyond its budget",
        "the KV cache of each GPU shrinks by as much; a restart",
    )
    duration = format_duration(excess.seconds)
    lasted = f", for {duration}" if facts.origin is FactsSource.TRACE else ""
    # The room that is left while the engine is at rest. Bursts need additional memory.
    room_bytes = max(0.0, (gpu.usable_bytes or 0.0) - excess.budget_bytes - excess.excess_bytes)
    return Advice(
        cause=Cause.OVER_BUDGET,
        summary=f"The engine holds more of {gpu.display_name} than its budget, from the start.",
        evidence=list_evidence(
            (
                "excess_bytes",
                excess.excess_bytes,
                f"{{}} ({100 * excess.ratio:.1f} %) more than its budget{lasted}",
            ),
            ("room_bytes", room_bytes, "that leaves {} between bursts"),
            ("needed_bytes", excess.needed_bytes, "a burst takes {}"),
            ("over_budget_exits", exits or None, "exits that this explains: {}"),
        ),
        changes=drop_none(lower_share),
        remark=(
            "Another start or another replica holds as much: its configuration does not fit this"
            " GPU."
        ),
    )


def _list_over_budget(facts: Facts) -> list[tuple[GpuFacts, BudgetExcess]]:
    """Return the GPUs on which the excess left little memory or explains an exit."""
    fatal_uuids = set()
    for end in facts.ends:
        fatal_gpu = causes.find_over_budget_gpu(end) if is_over_budget(end) else None
        if fatal_gpu is not None:
            fatal_uuids.add(fatal_gpu.uuid)
    gpus = []
    for gpu in facts.gpus:
        excess = gpu.excess
        if excess is None or gpu.usable_bytes is None or not excess.is_from_start:
            continue
        room_bytes = gpu.usable_bytes - excess.budget_bytes - excess.excess_bytes
        is_lasting = excess.seconds >= OVER_BUDGET_SECONDS
        # An excess is only a problem if it leaves too little memory or explains an exit.
        if gpu.uuid in fatal_uuids or (is_lasting and room_bytes < excess.tight_bytes):
            gpus.append((gpu, excess))
    return gpus


def find_shortage(facts: Facts, kind: Shortage) -> Advice | None:
    """Judge shortages on a GPU, except those caused by a leak.

    In a shortage, less than LOW_BYTES of GPU memory are free. The rule applies if any GPU had a
    shortage of this kind. The rule first proposes changes that make bursts smaller, in the order of
    the runbook HeadroomGpuMemoryPeak. The rule also proposes a smaller share for vLLM. With the
    smaller share, AIM_BYTES would have been free in the worst shortage. Returns None if the rule
    does not apply.
    """
    explained_uuids = _list_explained(facts, kind)
    spells = [
        (gpu, spell)
        for gpu in facts.gpus
        for spell in gpu.spells
        # A shortage explained by a leak or by other processes is not judged again.
        if spell.kind is kind and gpu.uuid not in explained_uuids
    ]
    if not spells:
        return None
    # The moment with the least room determines how much smaller the share must be.
    gpu, worst_spell = min(spells, key=lambda pair: pair[1].lowest_room_bytes)
    exits = sum(1 for _, spell in spells if spell.has_engine_exited)

    cause, summary_text = SHORTAGE_CAUSES[kind]
    summary = summary_text.format(gpu.display_name)
    smaller_share = take_less(facts, gpu, AIM_BYTES - worst_spell.lowest_room_bytes)
    if kind is Shortage.PEAK:
        if exits:
            summary = f"Bursts fill {gpu.display_name}, and the engine exits"
        changes = drop_none(_halve_steps(facts), _run_fewer(facts, gpu, worst_spell), smaller_share)
        remark = BURST_REMARK
    else:
        if facts.origin is FactsSource.PAGE:
            summary += " now"
        changes = drop_none(smaller_share)
        remark = SHORTAGE_REMARK
    return Advice(
        cause=cause,
        summary=f"{summary}.",
        evidence=_list_shortage_evidence(facts, gpu, worst_spell, times=len(spells), exits=exits),
        changes=changes,
        remark=remark,
    )


def _list_explained(facts: Facts, kind: Shortage) -> set[str]:
    """Return the UUIDs of GPUs whose shortages of this kind another rule explains."""
    if kind is Shortage.LEVEL:
        return {gpu.uuid for gpu, _ in _list_over_budget(facts)}
    if kind is Shortage.RISEN:
        return set()
    fatal_gpus = [causes.find_straight_growth_gpu(end) for end in facts.ends]
    fatal_gpus += [causes.find_over_budget_gpu(end) for end in facts.ends if is_over_budget(end)]
    return {gpu.uuid for gpu in fatal_gpus if gpu is not None}


def _list_shortage_evidence(
    facts: Facts, gpu: GpuFacts, spell: Spell, *, times: int, exits: int
) -> tuple[Figure, ...]:
    """Return the figures for the worst shortage, and the number of shortages.

    `exits` is how many shortages ended with the engine's exit.
    """
    begin = ""
    if spell.began_seconds is not None:
        begin = f" from {format_instant(spell.began_seconds)}"
    duration = ""
    if spell.seconds is not None:
        duration = f", for {format_duration(spell.seconds)}"
    roomy_load = ""
    if gpu.roomy_running is not None:
        roomy_load = f", at most {gpu.roomy_running:,.0f} while more was left"
    utilization = facts.settings.gpu_memory_utilization
    return list_evidence(
        (
            "least_room_bytes",
            spell.lowest_room_bytes,
            f"{{}} were left on {gpu.display_name}{begin}{duration}",
        ),
        (
            "times",
            times if times > 1 else None,
            f"{{}} times less than {format_size(LOW_BYTES)}",
        ),
        ("leak_state", gpu.leak.state, f"the leak detector's state is {gpu.leak.state}"),
        ("engine_ended", exits or None, "the engine released its memory after {} of them"),
        ("running", spell.running, f"{{}} requests ran then{roomy_load}"),
        (
            "gpu_memory_utilization",
            utilization,
            # An unknown utilization is not shown, because `list_evidence` drops that figure.
            f"vLLM may take {utilization or 0.0:.3g} of the GPU",
        ),
    )


FEWEST_STEP_TOKENS: Final = 1024
"""Our choice: fewer tokens per step than this are not halved. Prompts would then take too many
steps.
"""


def _halve_steps(facts: Facts) -> Change | None:
    """Return the change that halves the tokens per step and therefore also the activations.

    Returns None if the current value is unknown or below FEWEST_STEP_TOKENS.
    """
    step_tokens = facts.settings.max_num_batched_tokens
    if step_tokens is None or step_tokens < FEWEST_STEP_TOKENS:
        return None
    return lower_option(
        facts,
        Flag.MAX_NUM_BATCHED_TOKENS,
        step_tokens // 2,
        "halves what one step computes, and with it the memory of its peak",
        "long prompts take more steps; a restart",
    )


def _run_fewer(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    """Return a limit: the most requests that ran with enough memory left.

    Returns None if that number is unknown. Also returns None if the burst had no more requests than
    that.
    """
    if not facts.engines or not gpu.roomy_running or spell.running is None:
        return None
    if gpu.roomy_running >= spell.running:
        return None
    # The load is the total across all engines on the GPUs. The option applies to each engine.
    requests = floor(gpu.roomy_running / len(facts.engines))
    text = f"as many as ran with {format_size(LOW_BYTES)} and more left"
    cost = "in a burst requests wait in the queue; a restart"
    return lower_option(facts, Flag.MAX_NUM_SEQS, requests, text, cost)
