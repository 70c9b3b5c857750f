"""Which of a fleet are worst: the expressions, and how a table of them is joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dashboards.source.around import CELL
from dashboards.source.colours import BAD
from dashboards.source.grafana import Json, coloured, override, query
from dashboards.source.panels import DURATION, DURATION_DECIMALS, stat
from dashboards.source.series import BY_TARGET, ENGINE, FREE_FLOOR, SIDECAR, TARGET, TIME_TO_OOM_STEPS, situation

ROWS: Final = 50
"""As many as somebody reads; every column of a table queries these rows only."""

BY_MODEL: Final = "cluster, namespace, model_name"

AND_CHOSEN: Final = (
    f" and on ({BY_TARGET}) (headroom_engine_info{{{ENGINE}}}"
    f' or on ({BY_TARGET}) headroom_source_up{{{TARGET},source="engine"}} == 0 or on ({BY_TARGET}) {SIDECAR} == 0)'
)
"""Keeps what is of an engine of the models chosen, or of one that cannot be read: its model is not known."""

NEVER: Final = "1e9"
"""Seconds that no leak takes: what does not leak comes after what does, by the memory that is free."""


def worst(rank: str) -> str:
    """Return the rows to show, whose value is their rank."""
    return f"bottomk({ROWS}, {rank})"


def ranked(more: str = "") -> str:
    """Return the rank of each of the engines' GPUs, from its recording rule; without a page its model is not known."""
    return f'gpu:headroom_gpu_room:rank{{{TARGET},model_name=~"$model_name|"{more}}}'


CHOSEN: Final = f"{situation()}{AND_CHOSEN}"
"""The place in SITUATIONS of what holds for each engine."""


def in_the_chosen_situations(expr: str) -> str:
    """Return what of `expr` is in a situation that is chosen; `up`, of which one is made, has no label to select by."""
    marked = f'label_replace({expr}, "chosen", "yes", "situation", "$situation")'
    wanted = 'label_replace(vector(1), "chosen", "yes", "", "")'
    return f"max by ({BY_TARGET}, situation) ({marked} and on (chosen) {wanted})"


def shortened(expr: str) -> str:
    """Return `expr` with the ends of long names: where they are cut off at the right, all pods look alike."""
    for label in ("pod", "model_name"):
        expr = f'label_replace({expr}, "{label}", "…$1", "{label}", ".+(.{{22}})")'
    return expr


def with_link(expr: str, *, gpu: bool = False) -> str:
    """Return `expr`, which has no metric name, with a label `open`: the part of a link that chooses the engine.

    Made here because Grafana leaves the name of a column that is not there in a link as it is: bare metal has no pod.
    """
    labels = ("namespace", "job", "pod", "instance", *(("uuid",) if gpu else ()))
    before = "cluster"
    for label in labels:
        expr = f'label_join({expr}, "open", "&var-{label}=", "{before}", "{label}")'
        before = "open"
    return expr


def leading(column: str, text: str, title: str, url: str, **more: Any) -> Json:
    """Return how a column of parts of addresses is shown: a word that leads there."""
    shown = {"text": text, "color": "blue", "index": 0}
    return override(
        column,
        displayName=" ",
        custom__width=20 + 10 * len(text),
        custom__cellOptions={"type": "color-text"},
        mappings=[{"type": "regex", "options": {"pattern": ".*", "result": shown}}],
        links=[{"title": title, "url": url, **more}],
    )


OPEN: Final = leading(
    "open",
    "open",
    "Open this engine",
    f"/d/headroom?${{datasource:queryparam}}&var-cluster={CELL}&${{__url_time_range}}",
)

GPU_WIDTH: Final = 120
"""Enough for a MIG instance's."""

IDENTITY: Final = ("open", "situation", "cluster", "namespace", "pod", "instance", "model_name", "gpu")
NARROW: Final = [
    override("cluster", custom__width=80),
    override("namespace", custom__width=120),
    override("instance", custom__width=190),
    override("GPU", custom__width=GPU_WIDTH),
]


def organized(order: Iterable[str], hidden: Iterable[str], names: Json) -> Json:
    """Return the transformation that puts columns in order, leaves some out and renames some."""
    return {
        "id": "organize",
        "options": {
            "excludeByName": dict.fromkeys(("Time", *hidden), True),
            "indexByName": {name: place for place, name in enumerate(order)},
            "renameByName": names,
        },
    }


def joined(
    columns: Iterable[tuple[str, str]],
    *unnamed: str,
    sort: str = "A",
    limit: int | None = None,
    present: str | None = None,
) -> list[Json]:
    """Return the transformations that join queries by their labels and sort by these queries' values, the last first.

    `columns` are the queries' letters and what their values are called; the values of `unnamed` queries are not shown.
    What the query `present` does not have is left out.
    """
    names = {f"Value #{letter}": name for letter, name in columns}
    hidden = ["uuid", "job", *(f"Value #{letter}" for letter in unnamed)]
    return [
        {"id": "merge", "options": {}},
        *([] if present is None else [with_value(present)]),
        *({"id": "sortBy", "options": {"fields": {}, "sort": [{"field": f"Value #{each}"}]}} for each in sort),
        *([] if limit is None else [{"id": "limit", "options": {"limitField": limit}}]),
        organized([*IDENTITY, *names], hidden, {"model_name": "model", "gpu": "GPU", **names}),
    ]


def with_value(letter: str) -> Json:
    """Return the transformation that keeps the rows which this query has."""
    has_a_value = {"fieldName": f"Value #{letter}", "config": {"id": "isNotNull", "options": {}}}
    return {"id": "filterByValue", "options": {"filters": [has_a_value], "type": "include", "match": "all"}}


def number(name: str, unit: str, width: int, thresholds: Json | None = None, **more: Any) -> Json:
    """Return how a column of numbers is shown, coloured by `thresholds` where there are any."""
    if thresholds:
        more |= {
            "thresholds": thresholds,
            "color": {"mode": "thresholds"},
            "custom__cellOptions": {"type": "color-text"},
        }
    return override(name, unit=unit, custom__width=width, **more)


NUMBERS: Final = [
    number("earliest OOM", DURATION, 165, TIME_TO_OOM_STEPS, decimals=DURATION_DECIMALS),
    number("likely OOM", DURATION, 165, TIME_TO_OOM_STEPS, decimals=DURATION_DECIMALS),
    number("leak rate", "binBps", 90),
    number("unreported", "percentunit", 100, decimals=1),
    number("free", "bytes", 80, FREE_FLOOR),
    number("at the peak", "bytes", 100, FREE_FLOOR),
    number("KV cache", "percentunit", 85, decimals=0),
]

SEVERITIES: Final = (("page", BAD), ("critical", "light-red"), ("warning", "orange"), ("info", "blue"))


def firing_alerts(width: int) -> Json:
    """Return how many alerts of each severity are firing, the worst first."""
    firing = f'ALERTS{{alertname=~"Headroom.+",alertstate="firing",{TARGET},severity='
    counts = (f'count by (severity) ({firing}"{severity}"}})' for severity, _ in SEVERITIES)
    return stat(
        "Alerts",
        "How many alerts are firing, by severity. None also where Prometheus does not evaluate the rules.",
        [query(" or ".join(counts), "{{severity}}")],
        unit="none",
        width=width,
        named=True,
        noValue="none",
        overrides=[coloured(severity, colour) for severity, colour in SEVERITIES],
    )
