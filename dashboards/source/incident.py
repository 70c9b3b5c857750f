"""The dashboard of the hour around an incident: everything on one time axis, one below the other."""

from __future__ import annotations

from dashboards.source import around
from dashboards.source.alerts import alerts
from dashboards.source.colours import BAD, FINISHED_COLOUR, GOOD, RUNNING_COLOUR, WAITING_COLOUR, WARNING
from dashboards.source.dashboard import Row, dashboard
from dashboards.source.grafana import Json, coloured, query, steps, values
from dashboards.source.health import RESIDENT, ROLE_LINES
from dashboards.source.panels import LOWEST, MEAN_AND_HIGHEST
from dashboards.source.requests import PREEMPTIONS, WAITING
from dashboards.source.series import (
    BY_GPU,
    ENGINE,
    FREE,
    GPU,
    MIB,
    ROOMS,
    RUNNING,
    SIDECAR,
    SITUATION_VALUES,
    TARGET,
    lines_of_held,
    of_gpus,
    rooms,
    situation,
)
from dashboards.source.truth import HOLDERS
from dashboards.source.wide import lines, states


def incident() -> Json:
    """Return `headroom-incident.json`."""
    return dashboard(
        uid="headroom-incident",
        title="Headroom: incident",
        description="The hour around an out-of-memory or a restart of one engine, on one time axis.",
        since="now-1h",
        refresh="30s",
        marks=around.marks(),
        one_engine=True,
        rows=[
            Row(title="What fired, what answered?", panels=[_alerts(), _situation(), _answers()]),
            Row(title="Where did the memory go?", panels=[_ledger(), _free(), _host()]),
            Row(title="What was it doing?", panels=[_load(), _kv_cache(), _events()]),
            Row(title="What to do about it?", panels=[alerts(width=24)]),
        ],
    )


def _alerts() -> Json:
    alerts = f'ALERTS{{alertname=~"Headroom.+",{TARGET}}}'
    by = "max by (alertname)"
    firing, pending = (alerts.replace("{", f'{{alertstate="{state}",', 1) for state in ("firing", "pending"))
    return states(
        "Alerts",
        "Headroom's alerts: pending until they have held as long as the rule asks, then firing.",
        [query(f"2 * {by} ({firing}) or {by} ({pending})", "{{alertname}}")],
        values((1, "pending", WARNING), (2, "firing", BAD)),
        height=5,
        noValue="no alert",
    )


def _answers() -> Json:
    engine = f'max by (instance) (headroom_source_up{{{TARGET},source="engine"}})'
    asleep = f"1 - min by (instance) (headroom_engine_awake{{{ENGINE}}})"
    return states(
        "What answers",
        "The sidecar to Prometheus; vLLM's page, the GPU driver and /proc to the sidecar; all of the GPUs to the "
        "driver. Nothing is drawn where nothing was known.",
        [
            query(f"max by (instance) ({SIDECAR})", "sidecar"),
            query(f"{engine} + {asleep} or {engine}", "engine"),
            query(
                f'max by (instance, source) (headroom_source_up{{{TARGET},source!="engine"}})',
                "{{source}}",
            ),
            query(f"min by (instance) (headroom_gpu_up{{{GPU}}})", "GPUs"),
        ],
        values((0, "no answer", BAD), (1, "answers", GOOD), (2, "asleep", "dark-purple")),
        height=6,
    )


def _situation() -> Json:
    return states(
        "Situation",
        "The worst that held for the engine and its GPUs, as the sidecar saw it.",
        [query(f"min({situation()})", "situation")],
        SITUATION_VALUES,
        height=4,
    )


def _ledger() -> Json:
    fullest = f"bottomk(1, min_over_time({FREE}{{{GPU}}}[$__range] @ end()))"
    return lines(
        "Memory of the fullest GPU, by holder",
        "Of the GPU that had least free in the time shown, stacked to its size; the number of that GPU is in the panel "
        "below. The line on top is the highest use between two scrapes.",
        lines_of_held(GPU, f" and on ({BY_GPU}) {fullest}"),
        height=8,
        unit="bytes",
        stacked=True,
        min=0,
        overrides=HOLDERS,
    )


def _free() -> Json:
    return lines(
        "Free memory of each GPU",
        "The thick line is free memory at the scrapes, the thin line the lowest between them. In the red, under 512 "
        "MiB, the next large prompt may end the engine. Nothing is drawn while it is down, loads or sleeps: the card "
        "is empty then.",
        rooms(),
        figures=LOWEST,
        height=8,
        unit="bytes",
        min=0,
        thresholds=steps((None, BAD), (512 * MIB, "transparent")),
        custom={"thresholdsStyle": {"mode": "area"}, "axisSoftMin": 0, "axisSoftMax": 2**30},
        overrides=ROOMS,
    )


def _host() -> Json:
    return lines(
        "Host memory by process role",
        "Resident memory of the engine's processes; a role that ends is a process that ended.",
        [RESIDENT],
        height=6,
        unit="bytes",
        min=0,
        overrides=ROLE_LINES,
    )


def _load() -> Json:
    finished = f"sum(rate(headroom_engine_requests_finished_total{{{ENGINE}}}[$__rate_interval]))"
    return lines(
        "Load",
        "Requests running and waiting, and how many finished per second.",
        [RUNNING, WAITING, query(finished, "finished per second")],
        figures=MEAN_AND_HIGHEST,
        height=6,
        unit="short",
        min=0,
        overrides=[
            coloured("running requests", RUNNING_COLOUR),
            coloured("waiting requests", WAITING_COLOUR),
            coloured("finished per second", FINISHED_COLOUR, custom__lineWidth=1),
        ],
    )


def _kv_cache() -> Json:
    return lines(
        "KV cache and preemptions",
        "The fullest engine's share of the KV cache in use; a full one queues and preempts, it is not out of memory. "
        "Preemptions are bars on a separate scale: their height is in the tooltip.",
        [query(f"max(headroom_engine_kv_cache_used_ratio{{{ENGINE}}})", "KV cache in use"), PREEMPTIONS],
        height=6,
        unit="percentunit",
        custom={"axisSoftMin": 0, "axisSoftMax": 1},
        overrides=[coloured("preemptions per second", BAD, unit="short", **BARS_WITHOUT_AN_AXIS)],
    )


BARS_WITHOUT_AN_AXIS = {"custom.drawStyle": "bars", "custom.fillOpacity": 80, "custom.axisPlacement": "hidden"}


def _events() -> Json:
    xids = f"headroom_gpu_xid_errors_total{{{GPU}}}"
    before = f"last_over_time({xids}[1h] offset $__interval)"
    return lines(
        "XID errors and restarts",
        "Errors the driver reported, by number: 48, 62, 64, 74, 79, 95, 119 and 120 are fatal, 13, 31, 43 and 45 are "
        "an application's. Restarts are seen where the engine's counters start over, at the first reading after the "
        "restart; in a new pod it is another engine.",
        [
            query(f"clamp_max({around.RESTARTED}, 1)", "restarted"),
            of_gpus(f"sum by (gpu, uuid, xid) ({xids} - ({before} or 0 * {xids})) > 0", "GPU {{gpu}} XID {{xid}}"),
        ],
        height=5,
        unit="short",
        bars=True,
        min=0,
        decimals=0,
        noValue="none",
        custom={"axisSoftMax": 1},
        overrides=[coloured("/restarted/", "blue"), coloured("/XID/", BAD)],
    )
