"""What the dashboards ask Prometheus for more than once."""

from __future__ import annotations

from typing import Final

from dashboards.source.colours import BAD, FIRST_ACTIONS, GONE, GOOD, NEUTRAL, SITUATIONS, STATES, WARNING, state_words
from dashboards.source.grafana import LEGEND, Json, coloured, override, query, steps, values

TARGET: Final = 'cluster=~"$cluster",namespace=~"$namespace",job=~"$job",pod=~"$pod",instance=~"$instance"'
GPU: Final = f'{TARGET},uuid=~"$uuid"'
ENGINE: Final = f'{TARGET},model_name=~"$model_name"'
"""Label matchers. `All` is `.*`, which matches a series without the label too: bare metal has no namespace."""

OF_SIDECARS: Final = 'job=~"(.+/)?vllm-headroom"'
SIDECAR: Final = f"up{{{TARGET},{OF_SIDECARS}}}"
"""Whether Prometheus can scrape it: by the name of the job, as in the alerts."""

BY_TARGET: Final = "cluster, namespace, job, pod, instance"
BY_GPU: Final = f"{BY_TARGET}, gpu, uuid"
FREE: Final = "headroom_gpu_memory_free_bytes"

MIB: Final = 2**20

RUNNING: Final = query(f"sum(headroom_engine_requests_running{{{ENGINE}}})", "running requests")

STATE_VALUES: Final = values(*((number, state_words(state), colour) for number, (state, colour) in enumerate(STATES)))

FREE_FLOOR: Final = steps((None, BAD), (512 * MIB, WARNING), (1024 * MIB, GOOD))
"""512 MiB: the most a step was seen to want at once (HeadroomGpuMemoryLow)."""

UNREPORTED: Final = steps((None, GOOD), (0.03, WARNING), (0.04, BAD))
"""As in the alerts on the discrepancy: shares of the card, beyond what there was when the engine first served."""


def numbered(expr: str) -> str:
    """Return `expr` with `gpu` as the alerts write it: it distinguishes instances of one card, which share its number.

    1, or 1 MIG-1a2b3c4d.
    """
    joined = f'label_join({expr}, "gpu", " ", "gpu", "uuid")'
    return f'label_replace({joined}, "gpu", "$1", "gpu", "([0-9]+( MIG-.{{8}})?).*")'


def of_gpus(expr: str, legend: str = "GPU {{gpu}}") -> Json:
    """Return a query whose series are called by their GPU, which `expr` has to keep with its UUID."""
    return query(numbered(expr), legend)


def situation(matchers: str = TARGET) -> str:
    """Return an expression for the place in SITUATIONS of what holds for each engine, with its name as a label."""
    places = {name: place for place, (name, _) in enumerate(SITUATIONS)}
    gone = f"{places.pop(GONE)} + (up{{{matchers},{OF_SIDECARS}}} == 0)"
    known = (f'{place} * (headroom_situation{{{matchers},situation="{name}"}} == 1)' for name, place in places.items())
    every = " or ".join((*known, f'label_replace({gone}, "situation", "{GONE}", "", "")'))
    return f"max by ({BY_TARGET}, situation) ({every})"


SITUATION_WORDS: Final = {name: name.replace("_", " ") for name, _ in SITUATIONS}
SITUATION_VALUES: Final = values(
    *((place, SITUATION_WORDS[name], colour) for place, (name, colour) in enumerate(SITUATIONS))
)
ACTION_VALUES: Final = values(*((place, FIRST_ACTIONS[name], NEUTRAL) for place, (name, _) in enumerate(SITUATIONS)))
SITUATION_NAMES: Final = [coloured(name, colour, displayName=SITUATION_WORDS[name]) for name, colour in SITUATIONS]
"""How a series named by a situation is shown."""


def leak_state(metric: str, matchers: str, by: str) -> str:
    """Return an expression for the number of the state that each of `metric` is in."""
    return " + ".join(
        f'{number} * max by (instance, {by}) ({metric}{{{matchers},state="{state}"}})'
        for number, (state, _) in enumerate(STATES)
    )


def free_at_the_peak(matchers: str) -> str:
    """Return an expression for what was free at the highest use of the last minute.

    Free and used memory are what can be had: reserved memory is not known with every driver.
    """
    return (
        f"headroom_gpu_memory_free_bytes{{{matchers}}} + headroom_gpu_memory_used_bytes{{{matchers}}}"
        f" - headroom_gpu_memory_used_peak_bytes{{{matchers}}}"
    )


def rooms() -> list[Json]:
    """Return the queries of what is free on each GPU and what its peaks left, but of an engine that has taken none.

    And of zero: where what is free stays the same, Grafana would put its line on the panel's upper edge.
    """
    empty = f'headroom_engine_state{{{TARGET},state=~"down|starting|asleep"}} == 1'
    lines = [
        of_gpus(f"{expr} unless on ({BY_TARGET}) {empty}", f"GPU {{{{gpu}}}}{name}")
        for expr, name in ((free_at_the_peak(GPU), " at its peaks"), (f"{FREE}{{{GPU}}}", ""))  # the last is on top
    ]
    return [*lines, query("vector(0)", "zero")]


ROOMS: Final = [
    override("/ at its peaks$/", custom__lineWidth=1, custom__hideFrom=LEGEND),
    coloured("zero", BAD, custom__hideFrom={**LEGEND, "tooltip": True}),
]
"""How the lines of `rooms` are drawn."""


def lowest_free(matchers: str) -> str:
    """Return an expression for the least that was free in the time shown, by the peaks; of a lost GPU too."""
    return (
        f"last_over_time(headroom_gpu_memory_free_bytes{{{matchers}}}[$__range])"
        f" + last_over_time(headroom_gpu_memory_used_bytes{{{matchers}}}[$__range])"
        f" - max_over_time(headroom_gpu_memory_used_peak_bytes{{{matchers}}}[$__range])"
    )


def time_to_oom(matchers: str, metric: str) -> str:
    """Return an expression for the GPU with the least time to out of memory, or why there is none.

    `TIME_TO_OOM_VALUES` says what the numbers below 0 mean.

    No leak is seen only by who can look: without an engine that answers there is no -1.
    """

    def in_state(states: str) -> str:
        return f'topk(1, headroom_leak_state{{{matchers},state=~"{states}"}} == 1)'

    seen = f'on () max(headroom_source_up{{{TARGET},source="engine"}}) == 1'
    return (
        f"bottomk(1, {metric}{{{matchers}}}) or on () -1 * {in_state('stable|unsettled')} and {seen}"
        f" or on () -2 * {in_state('warming_up')} or on () -3 * {in_state('asleep')}"
    )


TIME_TO_OOM_VALUES: Final = values(
    (-1, "no leak seen", NEUTRAL), (-2, "warming up", "light-blue"), (-3, "asleep", "dark-purple")
)
TIME_TO_OOM_STEPS: Final = steps((None, BAD), (3600, WARNING), (86400, "yellow"))
"""An hour pages, a day is critical, as in the alerts."""


def lines_of_held(matchers: str, only: str = "") -> list[Json]:
    """Return the queries of the ledger of one GPU: what of it is held by whom, free, and the peak.

    `only` goes after each selection, where the matchers have more than one.
    """
    return [
        query(f"max by (gpu, uuid, holder) (headroom_gpu_memory_held_bytes{{{matchers}}}{only})", "{{holder}}"),
        query(f"headroom_gpu_memory_reserved_bytes{{{matchers}}}{only}", "reserved by the driver"),
        query(f"headroom_gpu_memory_free_bytes{{{matchers}}}{only}", "free"),
        query(f"headroom_gpu_memory_used_peak_bytes{{{matchers}}}{only}", "peak"),
    ]


def ahead(matchers: str, left: str) -> str:
    """Return an expression for free memory that falls and is used up `left` seconds after it was last read.

    It has values later than that alone: where the time shown ends in the future. Two minutes: a scrape may be late.
    """
    seen = f'headroom_source_last_success_timestamp_seconds{{{TARGET},source="nvml"}}'
    since = f"(time() - max by ({BY_TARGET}) (last_over_time({seen}[$__range])) > 120)"
    free, seconds = (f"last_over_time({name}{{{matchers}}}[$__range])" for name in (FREE, left))
    grows = f'last_over_time(headroom_leak_state{{{matchers},state=~"growing|leaking"}}[$__range]) == 1'
    part = f"clamp_min(1 - {since} * on ({BY_TARGET}) group_right () (1 / {seconds}), 0)"
    return f"{free} * on ({BY_GPU}) {part} and on ({BY_GPU}) {grows}"
