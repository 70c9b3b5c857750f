"""The row of the engine's dashboard that is read first: its situation, and how long is left."""

from __future__ import annotations

from typing import Final

from dashboards.source import around
from dashboards.source.alerts import alerts_of_one_engine
from dashboards.source.colours import BAD, GONE, GOOD, RUNNING_COLOUR, SITUATIONS, WARNING
from dashboards.source.dashboard import Row
from dashboards.source.gpus import each_gpu
from dashboards.source.grafana import LEGEND, Json, on_the_right, override, query, steps
from dashboards.source.panels import DURATION, LOWEST, NOTHING, stat, state_timeline, timeseries
from dashboards.source.ranking import firing_alerts
from dashboards.source.series import (
    ACTION_VALUES,
    FREE,
    FREE_FLOOR,
    GPU,
    MIB,
    ROOMS,
    RUNNING,
    SITUATION_VALUES,
    TARGET,
    TIME_TO_OOM_STEPS,
    TIME_TO_OOM_VALUES,
    ahead,
    of_gpus,
    rooms,
    situation,
    time_to_oom,
)

GONE_PLACE: Final = [name for name, _ in SITUATIONS].index(GONE)


def about_to_die() -> Row:
    """Return the row that is read first."""
    return Row(
        title="How is it, and what to do first?",
        panels=[
            _situation(),
            _action(),
            firing_alerts(width=4),
            _earliest(),
            _likely(),
            _free(),
            _others(),
            _situations(),
            _room(),
            [each_gpu(), alerts_of_one_engine()],
        ],
    )


NOW: Final = query(f"bottomk(1, {situation()}) or on () vector({GONE_PLACE})", "{{namespace}} {{pod}} {{instance}}")
"""Named by whose it is. Without any series the sidecar is gone as well: its pod may be, with its target."""


INCIDENT: Final = {"title": "Incident", "url": "/d/headroom-incident?${__url_time_range}&${__all_variables}"}


def _situation() -> Json:
    return stat(
        "Situation",
        "The worst that holds for the engine and its GPUs, as on the sidecar's page. Sidecar gone: Prometheus gets "
        "nothing from it, and nothing is known about the engine.",
        [NOW],
        unit="none",
        width=7,
        height=4,
        noValue=NOTHING,
        mappings=[SITUATION_VALUES],
        text={"titleSize": 16},
        named=True,
        background=True,
        links=[INCIDENT, around.ALL_IN_THIS_SITUATION],
    )


def _action() -> Json:
    return stat(
        "What to do first",
        "The first thing to do in this situation; the runbook of the alert that fires has the rest.",
        [NOW],
        unit="none",
        width=17,
        height=4,
        noValue=NOTHING,
        mappings=[ACTION_VALUES],
        text={"valueSize": 22},
        links=[INCIDENT],
    )


def _situations() -> Json:
    return state_timeline(
        "Situation over time",
        "The worst that held at each time; nothing is drawn where Prometheus had no target.",
        [query(f"min({situation()})", "situation")],
        [SITUATION_VALUES],
        height=3,
    )


def _earliest() -> Json:
    return _time_left(
        "Out of memory at the earliest",
        "The lower bound of the time to out of memory, and the GPU it is of.",
        "time_to_oom_seconds_lower",
        width=7,
    )


def _likely() -> Json:
    return _time_left(
        "Likely out of memory",
        "Free memory over the rate of the leak, of the GPU that has least, and of host memory while it grows.",
        "time_to_oom_seconds",
        width=5,
    )


def _time_left(title: str, description: str, metric: str, *, width: int) -> Json:
    return stat(
        title,
        description,
        [
            of_gpus(time_to_oom(GPU, f"headroom_{metric}")),
            query(f"min(headroom_host_{metric}{{{TARGET}}})", "host memory"),
        ],
        unit=DURATION,
        width=width,
        named=True,
        noValue=NOTHING,
        mappings=[TIME_TO_OOM_VALUES],
        thresholds=TIME_TO_OOM_STEPS,
    )


def _free() -> Json:
    return stat(
        "Free now",
        "Memory free on the GPU that has least. A healthy vLLM leaves little: it takes 92 % when it starts.",
        [of_gpus(f"bottomk(1, {FREE}{{{GPU}}})")],
        unit="bytes",
        width=4,
        named=True,
        noValue=NOTHING,
        thresholds=FREE_FLOOR,
    )


def _others() -> Json:
    return stat(
        "Held by others",
        "What processes that are not the engine's hold, of the GPU where they hold most.",
        [of_gpus(f'topk(1, headroom_gpu_memory_held_bytes{{{GPU},holder="other"}})')],
        unit="bytes",
        width=4,
        named=True,
        noValue=NOTHING,
        thresholds=steps((None, GOOD), (2**30, WARNING)),
    )


def _room() -> Json:
    """Return the figure that the product is named after: free memory of each GPU."""
    return timeseries(
        "Headroom: free memory of each GPU",
        "Free memory of each GPU of the engine; the thin line is the lowest free memory per minute. Below the red "
        "line, 512 MiB, the next long prompt may be the last. A leak is a line that falls while running requests do "
        "not rise. Nothing is drawn while the engine is down, loads or sleeps: the card is empty then. "
        "If the time range ends in the future (Look ahead, above), the dashed line is the forecast of a leak, and the "
        "dotted line its lower bound.",
        [
            *rooms(),
            of_gpus(ahead(GPU, "headroom_time_to_oom_seconds"), "GPU {{gpu}} expected"),
            of_gpus(ahead(GPU, "headroom_time_to_oom_seconds_lower"), "GPU {{gpu}} at the earliest"),
            RUNNING,
        ],
        unit="bytes",
        width=13,
        height=11,
        min=0,
        figures=LOWEST,
        thresholds=steps((None, BAD), (512 * MIB, "transparent")),
        custom={"thresholdsStyle": {"mode": "line"}, "axisSoftMin": 0, "axisSoftMax": 2**30},
        overrides=[
            *ROOMS,
            override("/ expected$/", custom__lineStyle={"fill": "dash", "dash": [8, 6]}, custom__hideFrom=LEGEND),
            override(
                "/ at the earliest$/",
                custom__lineWidth=2,
                custom__lineStyle={"fill": "dash", "dash": [2, 6]},
                custom__hideFrom=LEGEND,
            ),
            on_the_right("running requests", RUNNING_COLOUR),
        ],
    )
