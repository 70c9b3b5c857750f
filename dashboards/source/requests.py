"""The rows of the engine's dashboard on requests: what one costs, the prefix cache, the KV cache and its queue."""

from __future__ import annotations

from dashboards.source.colours import BAD, GOOD, NEUTRAL, RUNNING_COLOUR, UNATTRIBUTED_COLOUR, WAITING_COLOUR
from dashboards.source.dashboard import Row
from dashboards.source.grafana import Json, coloured, on_the_right, override, query, steps
from dashboards.source.panels import MEAN_AND_HIGHEST, NOTHING, stat, timeseries
from dashboards.source.series import ENGINE, GPU, RUNNING, of_gpus

EACH = "{{model_name}} engine {{engine}}"
ALL_OF_IT = {"axisSoftMin": 0, "axisSoftMax": 1}
PREEMPTIONS = query(
    f"sum(rate(headroom_engine_preemptions_total{{{ENGINE}}}[$__rate_interval]))", "preemptions per second"
)
WAITING = query(f"sum(headroom_engine_requests_waiting{{{ENGINE}}})", "waiting requests")


def what_a_request_costs() -> Row:
    """Return memory over running requests, now and against its baseline."""
    return Row(
        title="Does a request cost more than it used to?",
        collapsed=True,
        panels=[
            timeseries(
                "Memory per running request",
                "Memory the engine holds over running requests: it falls as load rises, since the pool is there from "
                "the start.",
                [of_gpus(f"headroom_memory_per_running_request_bytes{{{GPU}}}"), RUNNING],
                unit="bytes",
                custom={"axisSoftMin": 0},
                overrides=[on_the_right("running requests", RUNNING_COLOUR)],
            ),
            timeseries(
                "Cost of a request over its baseline, at comparable load",
                "1 is what a request cost when the engine was young, or the configured baseline. The pool counts "
                "too, so it rises by little: whether memory grows is shown above.",
                [of_gpus(f"headroom_memory_per_running_request_ratio{{{GPU}}}")],
                unit="none",
                decimals=2,
                custom={"axisSoftMin": 0.95, "axisSoftMax": 1.15},
            ),
        ],
    )


def prefix_cache() -> Row:
    """Return whether the prefix cache pays."""
    rate = "sum(rate(headroom_engine_prefix_cache_{kind}_total{{{engine}}}[$__rate_interval]))"
    return Row(
        title="Is the prefix cache paying?",
        collapsed=True,
        panels=[
            timeseries(
                "Prefix cache hit ratio",
                "Hits over queries of the last five minutes. Below 0.3, the dashed line, looking up costs about what "
                "it saves. Nothing is drawn while there are no queries.",
                [query(f"headroom_engine_prefix_cache_hit_ratio{{{ENGINE}}}", EACH)],
                unit="percentunit",
                thresholds=steps((None, NEUTRAL), (0.3, GOOD)),
                custom={"thresholdsStyle": {"mode": "dashed"}, **ALL_OF_IT},
            ),
            timeseries(
                "Prompt tokens looked up and found per second",
                "How much traffic the ratio covers: tokens per second looked up in the prefix cache, and found there.",
                [
                    query(rate.format(kind="queries", engine=ENGINE), "looked up"),
                    query(rate.format(kind="hits", engine=ENGINE), "found"),
                ],
                unit="short",
                min=0,
                overrides=[coloured("looked up", UNATTRIBUTED_COLOUR), coloured("found", GOOD)],
            ),
        ],
    )


def kv_cache() -> Row:
    """Return the KV cache with the queue it makes."""
    return Row(title="KV cache and queue", collapsed=True, panels=[_used(), _queue(), _tokens(), _more(), _capacity()])


def _used() -> Json:
    return timeseries(
        "KV cache in use, with load",
        "The share of the KV cache in use. A full cache queues and preempts; it is not out of memory.",
        [
            query(f"headroom_engine_kv_cache_used_ratio{{{ENGINE}}}", EACH),
            query(f"headroom_engine_kv_cache_stranded_ratio{{{ENGINE}}}", f"{EACH}, held by no request"),
            RUNNING,
        ],
        unit="percentunit",
        figures=MEAN_AND_HIGHEST,
        custom=ALL_OF_IT,
        overrides=[on_the_right("running requests", RUNNING_COLOUR)],
    )


def _queue() -> Json:
    return timeseries(
        "Requests running and waiting, preemptions",
        "Preempted work is done again: a steady rate means that too many requests run for the cache there is.",
        [RUNNING, WAITING, PREEMPTIONS],
        unit="short",
        figures=MEAN_AND_HIGHEST,
        min=0,
        overrides=[
            coloured("running requests", RUNNING_COLOUR),
            coloured("waiting requests", WAITING_COLOUR),
            on_the_right("preemptions per second", BAD),
        ],
    )


def _tokens() -> Json:
    return timeseries(
        "KV-cache tokens per running request",
        "Live KV-cache tokens over running requests: how long the conversations are.",
        [query(f"headroom_engine_kv_cache_tokens_per_running_request{{{ENGINE}}}", EACH)],
        unit="short",
        width=9,
        min=0,
    )


def _more() -> Json:
    return timeseries(
        "Requests that still fit",
        "How many more requests of today's average size the free KV cache takes, and how many wait.",
        [query(f"headroom_engine_additional_requests{{{ENGINE}}}", EACH), WAITING],
        unit="short",
        width=9,
        min=0,
        overrides=[coloured("waiting requests", WAITING_COLOUR)],
    )


def _capacity() -> Json:
    return stat(
        "KV cache capacity",
        "Tokens the KV cache holds, and its bytes where they can be known.",
        [
            query(f"sum(headroom_engine_kv_cache_capacity_tokens{{{ENGINE}}})", "tokens"),
            query(f"sum(headroom_engine_kv_cache_capacity_bytes{{{ENGINE}}})", "bytes"),
        ],
        unit="short",
        width=6,
        height=8,
        named=True,
        noValue=NOTHING,
        text={"titleSize": 14, "valueSize": 36},
        overrides=[override("bytes", unit="bytes")],
    )
