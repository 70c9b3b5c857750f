"""The rows of the engine's dashboard that are read first: how long is left, and who holds the memory."""

from __future__ import annotations

from dashboards.source.colours import (
    BAD,
    ENGINE_COLOUR,
    FREE_COLOUR,
    GOOD,
    NEUTRAL,
    OTHER_COLOUR,
    PARTS,
    PEAK_COLOUR,
    REPORTED_COLOUR,
    RESERVED_COLOUR,
    RUNNING_COLOUR,
    UNATTRIBUTED_COLOUR,
    UNREPORTED_COLOUR,
    WARNING,
)
from dashboards.source.dashboard import Row
from dashboards.source.gpus import each_gpu
from dashboards.source.grafana import Json, coloured, on_the_right, override, query, steps, values
from dashboards.source.panels import stat, timeseries
from dashboards.source.series import (
    BY_GPU,
    ENGINE,
    FREE,
    FREE_FLOOR,
    GPU,
    MIB,
    RUNNING,
    STATE_VALUES,
    TARGET,
    TIME_TO_OOM_STEPS,
    TIME_TO_OOM_VALUES,
    UNREPORTED,
    ahead,
    free_at_the_peak,
    leak_state,
    lines_of_held,
    lowest_free,
    still,
    time_to_oom,
)


def about_to_die() -> Row:
    """Return the row that is read first."""
    return Row(
        title="Is it about to die?",
        panels=[_alerts(), _engine(), _left(), _least(), _state(), *_free(), _others(), _room(), each_gpu()],
    )


def _alerts() -> Json:
    firing = f'ALERTS{{alertname=~"Headroom.+",alertstate="firing",severity=~"page|critical|warning",{TARGET}}}'
    return stat(
        "Alerts",
        "How many of the alerts on this engine are firing, by severity; the incident dashboard names them. None also "
        "where Prometheus does not evaluate the rules.",
        [query(f"count by (severity) ({firing})", "{{severity}}")],
        unit="none",
        width=2,
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
        "Whether vLLM answers the sidecar, and is awake; of several the worst. Unknown: Prometheus hears no sidecar.",
        [query(f"{answers} == 0 or 2 + min(headroom_engine_awake{{{ENGINE}}}) or {answers}")],
        unit="none",
        width=3,
        noValue="unknown",
        mappings=[
            values((0, "no answer", BAD), (1, "answers", GOOD), (2, "asleep", "dark-purple"), (3, "awake", GOOD))
        ],
    )


def _left() -> Json:
    return stat(
        "Time to out of memory",
        "Free memory over the rate of the leak, of the GPU that has least. Only a growing or leaking GPU has one; "
        "unknown: the engine does not answer, or what it holds cannot be told.",
        [query(time_to_oom(GPU))],
        unit="dtdurations",
        width=4,
        noValue="unknown",
        mappings=[TIME_TO_OOM_VALUES],
        thresholds=TIME_TO_OOM_STEPS,
    )


def _least() -> Json:
    return stat(
        "At the least",
        "The lower bound of the time to out of memory, and the GPU it is of; drawn only while one grows or leaks.",
        [query(f"bottomk(1, headroom_time_to_oom_seconds_lower{{{GPU}}})", "GPU {{gpu}}")],
        unit="dtdurations",
        width=3,
        named=True,
        noValue="none",
        thresholds=TIME_TO_OOM_STEPS,
    )


def _state() -> Json:
    return stat(
        "Leak state",
        "What the detector says, of the GPU that is worst: growing is the early warning, leaking the alarm. "
        "Unsettled: load has just changed, and it waits before it judges.",
        [query(f"max({leak_state('headroom_leak_state', GPU, 'gpu')})")],
        unit="none",
        width=3,
        noValue="unknown",
        mappings=[STATE_VALUES],
    )


def _free() -> list[Json]:
    return [
        stat(
            "Free now",
            "Memory free on the GPU that has least. A healthy vLLM leaves little: it takes 92 % when it starts.",
            [query(still(f"{FREE}{{{GPU}}}", "bottomk"), "GPU {{gpu}}")],
            unit="bytes",
            width=3,
            named=True,
            drawn=True,
            noValue="unknown",
            thresholds=FREE_FLOOR,
        ),
        stat(
            "Lowest free",
            "The least that was free at any moment of the time shown: from the peaks that the sidecar keeps between "
            "scrapes, of the GPU that had least.",
            [query(f"min({lowest_free(GPU)})")],
            unit="bytes",
            width=3,
            noValue="unknown",
            thresholds=FREE_FLOOR,
        ),
    ]


def _others() -> Json:
    return stat(
        "Held by others",
        "What processes that are not the engine's hold, of the GPU where they hold most.",
        [query(still(f'headroom_gpu_memory_held_bytes{{{GPU},holder="other"}}', "topk"), "GPU {{gpu}}")],
        unit="bytes",
        width=3,
        named=True,
        drawn=True,
        noValue="unknown",
        thresholds=steps((None, GOOD), (2**30, WARNING)),
    )


def _room() -> Json:
    """Return the figure that the product is named after: free memory of each GPU, down to a red zero."""
    free = f"headroom_gpu_memory_free_bytes{{{GPU}}}"
    return timeseries(
        "Headroom: free memory of each GPU, down to zero",
        "What is free on each GPU of the engine, and as a thin line what its peaks left. Below the red line, 512 MiB, "
        "the next long prompt may be the last. A leak is a line that falls while running requests do not rise. "
        "Where the time shown ends in the future (Look ahead, above), what a leak will leave is dashed, and dotted if "
        "it is as fast as it may be.",
        [
            query(free, "GPU {{gpu}}"),
            query(free_at_the_peak(GPU), "GPU {{gpu}} at its peaks"),
            query(ahead(GPU, "headroom_time_to_oom_seconds"), "GPU {{gpu}} expected"),
            query(ahead(GPU, "headroom_time_to_oom_seconds_lower"), "GPU {{gpu}} at the least"),
            RUNNING,
        ],
        unit="bytes",
        width=15,
        height=10,
        min=0,
        thresholds=steps((None, BAD), (512 * MIB, "transparent")),
        custom={"thresholdsStyle": {"mode": "line"}, "axisSoftMin": 0, "axisSoftMax": 2**30},
        overrides=[
            override("/ at its peaks$/", custom__lineWidth=1),
            override("/ expected$/", custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
            override("/ at the least$/", custom__lineWidth=1, custom__lineStyle={"fill": "dot", "dash": [1, 5]}),
            on_the_right("running requests", RUNNING_COLOUR),
        ],
    )


def _unreported() -> Json:
    unreported = f"headroom_memory_discrepancy_bytes{{{GPU}}}"
    first = f"instance:headroom_memory_discrepancy_bytes:first_served{{{GPU}}}"
    return stat(
        "Unreported",
        "What the engine holds beyond what it reports or was told to use, of the GPU that is furthest off. Up to some "
        "2 GB lie outside the budget by design: CUDA context, NCCL, graphs. What came since the engine first served, "
        "as a share of the card, is what the alerts go by; it needs their rules.",
        [
            query(f"max(headroom_memory_discrepancy_ratio{{{GPU}}})", "of what is reported"),
            query(
                f"max(({unreported} - on ({BY_GPU}) {first}) / on ({BY_GPU}) headroom_gpu_memory_total_bytes{{{GPU}}})",
                "of the card, since it first served",
            ),
        ],
        unit="percentunit",
        width=12,
        decimals=1,
        named=True,
        noValue="unknown",
        thresholds=UNREPORTED,
        overrides=[override("of what is reported", thresholds=steps((None, NEUTRAL)))],
    )


def _more() -> Json:
    return stat(
        "More requests",
        "How many more requests of today's average size the free KV cache takes.",
        [query(f"sum(headroom_engine_additional_requests{{{ENGINE}}})")],
        unit="locale",
        width=12,
        decimals=0,
        noValue="unknown",
    )


def who_holds_the_memory() -> Row:
    """Return the ledger, and the engine's story beside it."""
    return Row(
        title="Who holds the memory, and does vLLM's story match?",
        panels=[_ledger(), _story(), _parts(), _unreported(), _more()],
    )


def _ledger() -> Json:
    made = timeseries(
        "Who holds the memory of GPU $gpu",
        "All memory of the GPU, by holder, stacked to its size. Unattributed is memory that no visible process "
        "accounts for. The line on top is the highest use between two scrapes.",
        lines_of_held(GPU),
        unit="bytes",
        width=24,
        height=8,
        stacked=True,
        min=0,
        overrides=HOLDERS,
    )
    return {**made, "repeat": "gpu", "repeatDirection": "h", "maxPerRow": 4}


def _parts() -> Json:
    return timeseries(
        "What the engine uses it for",
        "The engine's own ledger of the GPUs chosen, by the probe inside it: its parts sum to what it holds. "
        "Fragmented and cached is what torch has reserved and nobody uses; outside torch are CUDA, NCCL and libraries. "
        "Empty without a probe.",
        [query(f"sum by (part) (headroom_engine_memory_bytes{{{GPU}}})", "{{part}}")],
        unit="bytes",
        width=12,
        height=10,
        stacked=True,
        min=0,
        noValue="only the probe inside vLLM tells this",
        overrides=[coloured(part, colour) for part, colour in PARTS],
    )


HOLDERS = [
    coloured("engine", ENGINE_COLOUR),
    coloured("other", OTHER_COLOUR),
    coloured("unattributed", UNATTRIBUTED_COLOUR),
    coloured("reserved by the driver", RESERVED_COLOUR),
    coloured("free", FREE_COLOUR, custom__fillOpacity=25),
    coloured(
        "peak",
        PEAK_COLOUR,
        custom__stacking={"mode": "none", "group": "A"},
        custom__fillOpacity=0,
        custom__lineWidth=1,
    ),
]
"""How the lines of `lines_of_held` are drawn in a stack."""


def _story() -> Json:
    reported = f"headroom_memory_reported_bytes{{{GPU}}}"
    return timeseries(
        "Does the engine's story match the GPU's?",
        "Reported is what the engine says or was told to use; actual is what the GPU says it holds; each line is one "
        "GPU. Unreported is their difference, as a share of what is reported, of the GPU that is furthest off.",
        [
            query(reported, "GPU {{gpu}} reported ({{basis}})"),
            query(f"{reported} + headroom_memory_discrepancy_bytes{{{GPU}}}", "GPU {{gpu}} actual"),
            query(f"max(headroom_memory_discrepancy_ratio{{{GPU}}})", "unreported"),
        ],
        unit="bytes",
        width=12,
        height=10,
        decimals=2,
        overrides=[
            coloured("/reported \\(/", REPORTED_COLOUR, custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
            override("/actual/", custom__lineWidth=2),
            on_the_right("unreported", UNREPORTED_COLOUR, "percentunit", reaches=0.05, decimals=1),
        ],
    )
