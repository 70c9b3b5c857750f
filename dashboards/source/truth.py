"""The row of the engine's dashboard on who holds the memory, and whether vLLM's story matches."""

from __future__ import annotations

from dashboards.source.colours import (
    BAD,
    ENGINE_COLOUR,
    FREE_COLOUR,
    NEUTRAL,
    OTHER_COLOUR,
    PARTS,
    PEAK_COLOUR,
    REPORTED_COLOUR,
    RESERVED_COLOUR,
    UNATTRIBUTED_COLOUR,
)
from dashboards.source.dashboard import Row
from dashboards.source.grafana import LEGEND, Json, coloured, override, query, steps
from dashboards.source.panels import stat, timeseries
from dashboards.source.series import BY_GPU, ENGINE, FREE, GPU, UNREPORTED, lines_of_held, of_gpus


def _unreported() -> Json:
    unreported = f"headroom_memory_discrepancy_bytes{{{GPU}}}"
    first = f"instance:headroom_memory_discrepancy_bytes:first_served{{{GPU}}}"
    return stat(
        "Unreported",
        "What the engine holds beyond what it reports or its budget, of the GPU that is furthest off. Up to some "
        "2 GB lie outside the budget by design: CUDA context, NCCL, graphs. What came since the engine first served, "
        "as a share of the card, is what the alerts use; it needs their rules.",
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
        "More requests that fit",
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
        "Who holds the memory of GPU $uuid",
        "All memory of the GPU, by holder, stacked to its size. Unattributed is memory that no visible process "
        "accounts for. The line on top is the highest use between two scrapes. Left behind is what processes hold that "
        "serve no engine any more, counted with the engine or others in the stack.",
        [*lines_of_held(GPU), query(f"headroom_gpu_memory_left_behind_bytes{{{GPU}}}", "left behind")],
        unit="bytes",
        width=24,
        height=8,
        stacked=True,
        min=0,
        overrides=[*HOLDERS, LEFT_BEHIND],
    )
    return {**made, "repeat": "uuid", "repeatDirection": "h", "maxPerRow": 4}


def _parts() -> Json:
    fullest = f"bottomk(1, min_over_time({FREE}{{{GPU}}}[$__range] @ end()))"
    parts = f"headroom_engine_memory_bytes{{{GPU}}} and on ({BY_GPU}) {fullest}"
    return timeseries(
        "What the engine uses the fullest GPU for",
        "The engine's own ledger of that GPU, by the probe inside it: its parts sum to what it holds. "
        "Fragmented and cached is what torch has reserved and nobody uses; outside torch are CUDA, NCCL and libraries. "
        "Empty without a probe.",
        [query(f"max by (part) ({parts})", "{{part}}")],
        unit="bytes",
        width=12,
        height=10,
        stacked=True,
        min=0,
        noValue="only the probe inside vLLM exports this",
        overrides=[coloured(part, colour) for part, colour in PARTS],
    )


LEFT_BEHIND = coloured(
    "left behind",
    BAD,
    custom__stacking={"mode": "none", "group": "A"},
    custom__fillOpacity=0,
    custom__lineWidth=2,
)
HOLDERS = [
    coloured("engine", ENGINE_COLOUR),
    coloured("other", OTHER_COLOUR),
    coloured("unattributed", UNATTRIBUTED_COLOUR),
    coloured("reserved by the driver", RESERVED_COLOUR, custom__hideFrom=LEGEND),
    coloured("free", FREE_COLOUR, custom__fillOpacity=25),
    coloured(
        "peak",
        PEAK_COLOUR,
        custom__stacking={"mode": "none", "group": "A"},
        custom__fillOpacity=0,
        custom__lineWidth=1,
        custom__hideFrom=LEGEND,
    ),
]
"""How the lines of `lines_of_held` are drawn in a stack."""


def _story() -> Json:
    reported = f"headroom_memory_reported_bytes{{{GPU}}}"
    return timeseries(
        "Does the engine's story match the GPU's?",
        "Reported is what the engine reports, or its budget; actual is what it holds by the GPU driver.",
        [
            query(f"max by (basis) ({reported})", "reported ({{basis}})"),
            of_gpus(f"{reported} + headroom_memory_discrepancy_bytes{{{GPU}}}", "GPU {{gpu}} actual"),
        ],
        unit="bytes",
        width=12,
        height=10,
        decimals=2,
        overrides=[
            coloured("/^reported/", REPORTED_COLOUR, custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
            override("/actual/", custom__lineWidth=2),
        ],
    )
