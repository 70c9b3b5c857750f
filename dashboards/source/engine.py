"""The dashboard of one engine: an operator's questions, in the order in which they come up."""

from __future__ import annotations

from dashboards.source import around, dying, health, leaking, peaks, requests, truth, users
from dashboards.source.dashboard import dashboard
from dashboards.source.grafana import Json


def engine() -> Json:
    """Return `headroom.json`."""
    return dashboard(
        uid="headroom",
        title="Headroom: one engine",
        description="The situation of a vLLM engine, what to do first, and how long until it is out of memory.",
        since="now-6h",
        refresh="30s",
        marks=around.marks(),
        one_engine=True,
        looks_ahead=True,
        rows=[
            dying.about_to_die(),
            users.does_it_hurt_users(),
            leaking.is_it_leaking(),
            truth.who_holds_the_memory(),
            truth.inside_the_engine(),
            peaks.peaks_of_steps(),
            requests.what_a_request_costs(),
            requests.prefix_cache(),
            requests.kv_cache(),
            health.host_memory(),
            health.gpu_health(),
            health.sidecar(),
        ],
    )
