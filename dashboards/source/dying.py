"""The row of the engine's dashboard that is read first: how long is left."""

from __future__ import annotations

from dashboards.source.colours import BAD, GOOD, RUNNING_COLOUR, WARNING
from dashboards.source.dashboard import Row
from dashboards.source.gpus import each_gpu
from dashboards.source.grafana import LEGEND, Json, on_the_right, override, query, steps, values
from dashboards.source.panels import stat, timeseries
from dashboards.source.series import (
    ENGINE,
    FREE,
    FREE_FLOOR,
    GPU,
    MIB,
    ROOMS,
    RUNNING,
    STATE_VALUES,
    TARGET,
    TIME_TO_OOM_STEPS,
    TIME_TO_OOM_VALUES,
    ahead,
    leak_state,
    of_gpus,
    rooms,
    time_to_oom,
)


def about_to_die() -> Row:
    """Return the row that is read first."""
    return Row(
        title="Is it about to die?",
        panels=[_alerts(), _engine(), _left(), _least(), _state(), _free(), _others(), _room(), each_gpu()],
    )


def _alerts() -> Json:
    firing = f'ALERTS{{alertname=~"Headroom.+",alertstate="firing",{TARGET},severity='
    counts = (f'count by (severity) ({firing}"{severity}"}})' for severity in ("page", "critical", "warning"))
    return stat(
        "Alerts",
        "How many alerts on this engine are firing, the worst first; the incident dashboard names them. None also "
        "where Prometheus does not evaluate the rules.",
        [query(" or ".join(counts), "{{severity}}")],
        unit="none",
        width=3,
        named=True,
        noValue="none",
        thresholds=steps((None, BAD)),
        overrides=[override("warning", thresholds=steps((None, WARNING)))],
        links=[{"title": "Incident", "url": "/d/headroom-incident?${__url_time_range}&${__all_variables}"}],
    )


def _engine() -> Json:
    answers = f'min(headroom_source_up{{{TARGET},source="engine"}})'
    return stat(
        "Engine",
        "Whether vLLM answers the sidecar, and is awake; of several the worst. Unknown: Prometheus cannot scrape the "
        "sidecar.",
        [query(f"{answers} == 0 or 2 + min(headroom_engine_awake{{{ENGINE}}}) or {answers}")],
        unit="none",
        width=3,
        noValue="unknown",
        mappings=[
            values((0, "no answer", BAD), (1, "answers", GOOD), (2, "asleep", "dark-purple"), (3, "awake", GOOD))
        ],
    )


def _left() -> Json:
    return _time_left(
        "Time to out of memory",
        "Free memory over the rate of the leak, of the GPU that has least. Only a growing or leaking GPU has one; "
        "unknown: the engine does not answer, or the memory that it holds is unknown.",
        "headroom_time_to_oom_seconds",
        width=6,
    )


def _least() -> Json:
    return _time_left(
        "At the earliest",
        "The lower bound of the time to out of memory, and the GPU it is of.",
        "headroom_time_to_oom_seconds_lower",
    )


def _time_left(title: str, description: str, metric: str, *, width: int = 3) -> Json:
    return stat(
        title,
        description,
        [of_gpus(time_to_oom(GPU, metric))],
        unit="dtdurations",
        width=width,
        named=True,
        noValue="unknown",
        mappings=[TIME_TO_OOM_VALUES],
        thresholds=TIME_TO_OOM_STEPS,
    )


def _state() -> Json:
    return stat(
        "Leak state",
        "The detector's state, of the GPU that is worst: growing is the early warning, leaking the alarm. "
        "No leak seen: load has just changed, and the detector waits.",
        [query(f"max({leak_state('headroom_leak_state', GPU, 'gpu, uuid')})")],
        unit="none",
        width=3,
        noValue="unknown",
        mappings=[STATE_VALUES],
    )


def _free() -> Json:
    return stat(
        "Free now",
        "Memory free on the GPU that has least. A healthy vLLM leaves little: it takes 92 % when it starts.",
        [of_gpus(f"bottomk(1, {FREE}{{{GPU}}})")],
        unit="bytes",
        width=3,
        named=True,
        noValue="unknown",
        thresholds=FREE_FLOOR,
    )


def _others() -> Json:
    return stat(
        "Held by others",
        "What processes that are not the engine's hold, of the GPU where they hold most.",
        [of_gpus(f'topk(1, headroom_gpu_memory_held_bytes{{{GPU},holder="other"}})')],
        unit="bytes",
        width=3,
        named=True,
        noValue="unknown",
        thresholds=steps((None, GOOD), (2**30, WARNING)),
    )


def _room() -> Json:
    """Return the figure that the product is named after: free memory of each GPU, down to a red zero."""
    return timeseries(
        "Headroom: free memory of each GPU, down to zero",
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
        height=10,
        min=0,
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
