"""The rows of the engine's dashboard on who holds the memory, and what the engine uses it for."""

from __future__ import annotations

from dashboards.source.colours import (
    ENGINE_COLOUR,
    FREE_COLOUR,
    NEUTRAL,
    OTHER_COLOUR,
    PARTS,
    PEAK_COLOUR,
    RESERVED_COLOUR,
    UNATTRIBUTED_COLOUR,
)
from dashboards.source.dashboard import Row
from dashboards.source.grafana import LEGEND, Json, coloured, override, query, steps
from dashboards.source.panels import NOTHING, stat, timeseries
from dashboards.source.series import BY_GPU, FREE, GPU, UNREPORTED, of_gpus


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
        width=5,
        height=8,
        decimals=1,
        named=True,
        text={"titleSize": 14, "valueSize": 36},
        noValue=NOTHING,
        thresholds=UNREPORTED,
        overrides=[override("of what is reported", thresholds=steps((None, NEUTRAL)))],
    )


def who_holds_the_memory() -> Row:
    """Return who holds what beyond the plan."""
    return Row(title="Who holds the memory?", panels=[_beyond(), _held_by_others(), _unreported()])


def inside_the_engine() -> Row:
    """Return the engine's own ledger, in a closed row: most engines have no probe."""
    return Row(title="Inside the engine (with the probe)", collapsed=True, panels=[_parts()])


def _beyond() -> Json:
    over = f'headroom_memory_discrepancy_bytes{{{GPU},basis=~"budget|configured"}}'
    return timeseries(
        "What the engine holds beyond its budget",
        "Of each GPU, where the budget is known. Up to some 2 GB lie outside it by design: CUDA context, NCCL, graphs.",
        [of_gpus(f"max by (gpu, uuid) ({over})")],
        unit="bytes",
        width=10,
        custom={"axisSoftMin": 0, "axisSoftMax": 2**30},
    )


def _held_by_others() -> Json:
    return timeseries(
        "What others hold",
        "Thick: processes that are not the engine's. Thin: memory that no visible process accounts for. Dashed: what "
        "processes hold that serve no engine any more, counted with the engine or others.",
        [
            of_gpus(f'headroom_gpu_memory_held_bytes{{{GPU},holder="other"}}'),
            of_gpus(f'headroom_gpu_memory_held_bytes{{{GPU},holder="unattributed"}}', "GPU {{gpu}} unattributed"),
            of_gpus(f"headroom_gpu_memory_left_behind_bytes{{{GPU}}}", "GPU {{gpu}} left behind"),
        ],
        unit="bytes",
        width=9,
        custom={"axisSoftMin": 0, "axisSoftMax": 2**30},
        overrides=[
            override("/ unattributed$/", custom__lineWidth=1, custom__hideFrom=LEGEND),
            override("/ left behind$/", custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
        ],
    )


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
        width=24,
        height=10,
        stacked=True,
        min=0,
        noValue="only the probe inside vLLM exports this",
        overrides=[coloured(part, colour) for part, colour in PARTS],
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
