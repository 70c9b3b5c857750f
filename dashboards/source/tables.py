"""The fleet's tables: of engines, of alerts and of models, the worst first."""

from __future__ import annotations

from typing import Final

from dashboards.source.around import CELL
from dashboards.source.colours import BAD, NEUTRAL, SITUATIONS, WARNING
from dashboards.source.grafana import Json, override, query, steps, values
from dashboards.source.panels import table
from dashboards.source.ranking import (
    AND_CHOSEN,
    BY_MODEL,
    CHOSEN,
    NARROW,
    NEVER,
    NUMBERS,
    OPEN,
    ROWS,
    in_the_chosen_situations,
    joined,
    number,
    ranked,
    shortened,
    with_link,
    worst,
)
from dashboards.source.series import BY_GPU, BY_TARGET, SITUATION_WORDS, TARGET, free_at_the_peak, numbered

MODEL: Final = 'cluster=~"$cluster",namespace=~"$namespace",model_name=~"$model_name"'
"""What the recording rules keep."""


def engines() -> Json:
    """Return the table of engines."""
    # On a narrow screen the last columns are out of sight, so the most urgent figures come first.
    columns = {
        "earliest OOM": f"min by ({BY_TARGET}) (headroom_time_to_oom_seconds_lower{{{TARGET}}}"
        f" or headroom_host_time_to_oom_seconds_lower{{{TARGET}}})",
        "free": f"min by ({BY_TARGET}) (headroom_gpu_memory_free_bytes{{{TARGET}}})",
        "at the peak": f"min by ({BY_TARGET}) ({free_at_the_peak(TARGET)})",
        "leak rate": f"max by ({BY_TARGET}) (headroom_leak_bytes_per_second{{{TARGET}}})",
        "unreported": f"max by ({BY_TARGET}) (headroom_memory_discrepancy_ratio{{{TARGET}}} > -0.5)",
    }
    named = f'group by ({BY_TARGET}, model_name) (headroom_engine_info{{{TARGET},model_name=~"$model_name"}})'
    fullest = f"max by ({BY_GPU}) (bottomk by ({BY_TARGET}) (1, {ranked()}))"
    asked = (shortened(f"{each}{AND_CHOSEN}") for each in (named, numbered(fullest), *columns.values()))
    return table(
        "Engines, worst first",
        f"The {ROWS} engines that are worst off: by their situation, then by the time to out of memory. The figures "
        "are of the worst GPU of each; earliest OOM may be that of host memory. Time and rate are there only while "
        "something grows, unreported not while it sleeps; at the peak is what was free then. A number of Engines by "
        "situation leads to the engines of that situation alone, and the variable Situation chooses more than one.",
        [query(shortened(with_link(f"sort({in_the_chosen_situations(CHOSEN)})"))), *map(query, asked)],
        joined(zip("DEFGH", columns, strict=True), "A", "B", "C", sort="DA", limit=ROWS, present="A"),
        height=14,
        noValue="no engine is seen",
        overrides=[OPEN, *NARROW, _situation(), *NUMBERS],
    )


def _situation() -> Json:
    texts = [(name, SITUATION_WORDS[name], colour) for name, colour in SITUATIONS]
    return override(
        "situation", custom__width=105, mappings=[values(*texts)], custom__cellOptions={"type": "color-text"}
    )


def models() -> Json:
    """Return the table of models."""
    columns = {
        "GPUs": "gpus:sum",
        "leaking": "gpus_leaking:sum",
        "growing": "gpus_growing:sum",
        "likely OOM": "time_to_oom_seconds:min",
        "leak rate": "leak_bytes_per_second:max",
        "unreported": "memory_discrepancy_ratio:max",
        "free": "gpu_memory_free_bytes:min",
        "running": "engine_requests_running:sum",
        "waiting": "engine_requests_waiting:sum",
        "KV cache": "engine_kv_cache_used_ratio:max",
    }

    def rule(name: str) -> str:
        return f"namespace_model:headroom_{name}{{{MODEL}}}"

    rows = worst(
        f"max by ({BY_MODEL}) ({rule('time_to_oom_seconds:min')} or {NEVER} + {rule('gpu_memory_free_bytes:min')}"
        f" or {NEVER} * {NEVER} + {rule('engine_requests_running:sum')})"
    )
    asked = (query(f"max by ({BY_MODEL}) ({rule(name)}) and on ({BY_MODEL}) {rows}") for name in columns.values())
    return table(
        "Models, worst first",
        "Each model's worst GPU or engine in each column, and the sums of its requests. From the recording rules "
        f"(namespace_model:...), empty without them; {ROWS} at most. A model's name narrows this page to it.",
        [query(rows), *asked],
        joined(zip("BCDEFGHIJK", columns, strict=True), "A"),
        noValue="no engine is seen, or Prometheus does not have the recording rules",
        overrides=[
            override("model", links=[{"title": "Only this model", "url": ONLY_THIS_MODEL}]),
            *NARROW[:2],
            number("GPUs", "short", 70),
            number("leaking", "short", 85, steps((None, NEUTRAL), (1, BAD))),
            number("growing", "short", 85, steps((None, NEUTRAL), (1, WARNING))),
            number("running", "short", 85, decimals=0),
            number("waiting", "short", 85, decimals=0),
            *NUMBERS,
        ],
    )


ONLY_THIS_MODEL: Final = f"/d/headroom-fleet?${{datasource:queryparam}}&var-model_name={CELL}&${{__url_time_range}}"
