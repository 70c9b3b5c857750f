"""The row of the engine's dashboard on what users notice: vLLM's own figures, where Prometheus scrapes its page."""

from __future__ import annotations

from typing import Final

from dashboards.source.around import EXITED
from dashboards.source.colours import BAD, FINISHED_COLOUR, OTHER_COLOUR, RUNNING_COLOUR, WAITING_COLOUR, WARNING
from dashboards.source.dashboard import Row
from dashboards.source.grafana import Json, coloured, on_the_right, override, query
from dashboards.source.panels import MEAN_AND_HIGHEST, timeseries
from dashboards.source.requests import WAITING
from dashboards.source.series import ENGINE, RUNNING, TARGET

VLLM: Final = (
    'cluster=~"$cluster",namespace=~"$namespace",pod=~"$pod",model_name=~"$model_name",instance=~"$host(:[0-9]+)?"'
)
"""The engine beside the sidecar: the same pod and host under a job and port of vLLM's own."""

QUANTILES: Final = (("p50", 0.5, RUNNING_COLOUR), ("p95", 0.95, OTHER_COLOUR), ("p99", 0.99, BAD))
NOT_SCRAPED: Final = "Prometheus does not scrape vLLM's own page, or nothing was asked of it"


def does_it_hurt_users() -> Row:
    """Return whether requests wait, are slow, or fail."""
    return Row(title="Does it hurt users?", panels=[_queue(), _first_token(), _failures()])


def _queue() -> Json:
    finished = f"sum(rate(headroom_engine_requests_finished_total{{{ENGINE}}}[$__rate_interval]))"
    return timeseries(
        "Requests that run, wait and finish",
        "Requests that wait while few finish: users notice it now.",
        [RUNNING, WAITING, query(finished, "finished per second")],
        unit="short",
        width=8,
        height=9,
        min=0,
        figures=MEAN_AND_HIGHEST,
        overrides=[
            coloured("running requests", RUNNING_COLOUR),
            coloured("waiting requests", WAITING_COLOUR),
            on_the_right("finished per second", FINISHED_COLOUR),
        ],
    )


def _first_token() -> Json:
    buckets = f"sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{{{VLLM}}}[$__rate_interval]))"
    return timeseries(
        "Time to the first token",
        "How long half of the requests, 95 % and 99 % of them waited at most for their first token, as vLLM counts it "
        "(without the way through gateways).",
        [query(f"histogram_quantile({share}, {buckets})", name) for name, share, _ in QUANTILES],
        unit="s",
        width=8,
        height=9,
        min=0,
        noValue=NOT_SCRAPED,
        figures=MEAN_AND_HIGHEST,
        overrides=[coloured(name, colour) for name, _, colour in QUANTILES],
    )


def _failures() -> Json:
    finished = f'vllm:request_success_total{{{VLLM},finished_reason=~"error|abort"}}'
    answered = f'http_requests_total{{{VLLM_HTTP},status=~"5.."}}'
    lost = f"max(headroom_engine_exit_requests{{{TARGET}}}) and on () {EXITED_NOW}"
    return timeseries(
        "Requests that fail",
        "Answers of vLLM's server with a status of 500 and more, and requests that ended with an error or were aborted "
        "by their client, per second. Requests lost are those that ran or waited when the engine exited.",
        [
            query(f"sum(rate({answered}[$__rate_interval]))", "status 5xx"),
            query(f"sum by (finished_reason) (rate({finished}[$__rate_interval]))", "{{finished_reason}}"),
            query(lost, "requests lost at an exit"),
        ],
        unit="reqps",
        width=8,
        height=9,
        min=0,
        noValue=NOT_SCRAPED,
        figures=MEAN_AND_HIGHEST,
        custom={"axisSoftMax": 1},
        overrides=[
            coloured("status 5xx", BAD),
            coloured("error", WARNING),
            coloured("abort", RUNNING_COLOUR),
            override("requests lost at an exit", unit="short", custom__drawStyle="points", custom__pointSize=8),
        ],
    )


VLLM_HTTP: Final = VLLM.replace('model_name=~"$model_name",', "")
"""The server counts its answers without the model's name."""

EXITED_NOW: Final = f"max({EXITED})"
