"""The dashboard of many engines: how many are in trouble, and which are worst."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from dashboards.source import around, tables
from dashboards.source.alerts import alerts
from dashboards.source.colours import BAD, GPU_COLOURS
from dashboards.source.dashboard import Row, dashboard
from dashboards.source.grafana import Json, in_turn, query, steps
from dashboards.source.panels import DURATION, NOTHING, stat, timeseries
from dashboards.source.ranking import BY_MODEL, CHOSEN, NEVER, firing_alerts, ranked
from dashboards.source.series import (
    BY_GPU,
    SITUATION_NAMES,
    TARGET,
    TIME_TO_OOM_STEPS,
    TIME_TO_OOM_VALUES,
)
from dashboards.source.tables import MODEL

LINES: Final = 5
READ: Final = f'headroom_source_up{{{TARGET},source="engine"}}'


def fleet() -> Json:
    """Return `headroom-fleet.json`."""
    return dashboard(
        uid="headroom-fleet",
        title="Headroom: fleet",
        description="The engines that are worst off, of all that have a vllm-headroom sidecar.",
        since="now-6h",
        refresh="1m",
        marks=[around.alerts("page|critical"), around.images(), around.versions()],
        one_engine=False,
        rows=[
            Row(title="How many are in trouble?", panels=_counts()),
            Row(title="Which are worst?", panels=[tables.engines(), alerts(width=24)]),
            Row(title="By model, of every instance", panels=[tables.models(), *_over_time()]),
        ],
    )


def _counts() -> list[Json]:
    return [
        firing_alerts(width=5),
        stat(
            "Engines by situation",
            "The worst that holds for each engine and its GPUs, the rarest first. Sidecar gone: Prometheus cannot "
            "scrape it, and its engine is unknown.",
            [query(f"sort(count by (situation) ({CHOSEN}))", "{{situation}}")],
            unit="locale",
            width=11,
            noValue="none seen",
            named=True,
            overrides=SITUATION_NAMES,
            links=[around.ALL_IN_THIS_SITUATION],
        ),
        stat(
            "Out of memory at the earliest",
            "The lower bound of the time to out of memory, of the GPU that has least.",
            [query(_time_to_oom())],
            unit=DURATION,
            width=5,
            noValue=NOTHING,
            mappings=[TIME_TO_OOM_VALUES],
            thresholds=TIME_TO_OOM_STEPS,
        ),
        stat(
            "Engines",
            "Of every situation, those whose sidecar is gone included.",
            [query(f"count({CHOSEN})")],
            unit="locale",
            width=3,
            noValue="none",
        ),
    ]


def _time_to_oom() -> str:
    """Return an expression for the earliest time to out of memory, or why there is none (`TIME_TO_OOM_VALUES`).

    No leak is seen only by who can look: without an engine that answers there is no -1.
    """

    def any_in(states: str) -> str:
        matcher = f',state=~"{states}"'
        return f"group({ranked(matcher)})"

    least = ranked(',state=~"growing|leaking"')
    seen = f"on () max({READ}) == 1"
    # The rank has the likely time: it counts only where no lower bound is known.
    earliest = f"headroom_time_to_oom_seconds_lower{{{TARGET}}} and on ({BY_GPU}) {least}"
    return (
        f"min({earliest} or on ({BY_GPU}) {least} < {NEVER}) or -1 * {any_in('stable|unsettled')} and {seen}"
        f" or -2 * {any_in('warming_up')} or -3 * {any_in('asleep')}"
    )


def _over_time() -> list[Json]:
    return [
        _by_model(
            "Likely time to out of memory, by model",
            "Of each model's GPUs the one that has least; only a growing or leaking GPU has one.",
            f"namespace_model:headroom_time_to_oom_seconds:min{{{MODEL}}}",
            least=True,
            unit=DURATION,
            noValue="no leak seen",
            thresholds=steps((None, BAD), (3600, "transparent")),
            custom={"thresholdsStyle": {"mode": "area"}, "scaleDistribution": {"type": "log", "log": 10}},
        ),
        _by_model(
            "Leaking GPUs, by model",
            "How many of each model's GPUs are in the state leaking.",
            f"namespace_model:headroom_gpus_leaking:sum{{{MODEL}}}",
            unit="short",
            noValue="none",
            decimals=0,
            stacked=True,
            custom={"axisSoftMin": 0, "axisSoftMax": 1},
        ),
        _by_model(
            "Worst discrepancy, by model",
            "What engines hold beyond what they report, as a share of it, of each model's GPU that is furthest off.",
            f"namespace_model:headroom_memory_discrepancy_ratio:max{{{MODEL}}}",
            unit="percentunit",
            noValue=NOTHING,
            custom={"axisSoftMin": 0, "axisSoftMax": 0.06},
        ),
    ]


def _by_model(title: str, description: str, series: str, *, least: bool = False, **more: Any) -> Json:
    """Return the lines of the models that were worst in the time shown: a query for each, and so a colour."""
    which, over = ("bottomk", "min") if least else ("topk", "max")
    foremost = [f"{which}({n}, {over}_over_time({series}[$__range] @ end()) > 0)" for n in range(1, LINES + 1)]
    places = [foremost[0], *(f"({after} unless {before})" for before, after in pairwise(foremost))]
    legend = "{{cluster}} {{namespace}} {{model_name}}"
    lines = [query(f"{series} and on ({BY_MODEL}) {place}", legend) for place in places]
    text = f"{description} The {LINES} worst of the time shown; from the recording rules."
    return timeseries(title, text, lines, width=8, height=9, overrides=in_turn(GPU_COLOURS[:LINES]), **more)
