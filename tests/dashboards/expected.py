"""Which queries have no data, over which targets, and why; every other has some over every target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tests.dashboards.grafana import Json, every_query
from tests.dashboards.store import BARE, PEAKS, TARGETS

EVERYWHERE: Final = frozenset(TARGETS)
TIME, LEAKING = "Likely time to out of memory, by model", "Leaking GPUs, by model"
WORST: Final = "Worst discrepancy, by model"
LEAKS: Final = frozenset({"leak", "eight GPUs", "MIG", BARE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """What has no data over some targets: by dashboard and panel the queries' names, none for all of them."""

    why: str
    over: frozenset[str]
    queries: Mapping[str, Mapping[str, tuple[str, ...]]]


EMPTY: Final = (
    Empty(
        why="nothing leaks",
        over=EVERYWHERE - LEAKS,
        queries={
            "headroom": {
                "Leak rate, with the 95 % interval of the fastest": (),
                "Leaked": (),
                "Each GPU, and when it will be full": ("D", "E"),
            },
            "headroom-fleet": {
                "Engines, worst first": ("D", "G"),
                "Models, worst first": ("E", "F"),
                TIME: (),
                LEAKING: (),
            },
        },
    ),
    Empty(
        why="a target is one model, but every namespace is that of bare metal",
        over=EVERYWHERE - {BARE},
        queries={"headroom-fleet": {TIME: ("B", "C", "D"), LEAKING: ("B", "C", "D"), WORST: ("B", "C", "D", "E")}},
    ),
    Empty(
        why="four models leak",
        over=EVERYWHERE,
        queries={"headroom-fleet": {TIME: ("E",), LEAKING: ("E",)}},
    ),
    Empty(
        why="nothing is wrong for long enough",
        over=frozenset({"healthy", "burst", "engine down", "asleep", "small card"}),
        queries={
            "headroom": {"Alert begins to fire": (), "Alerts": (), "Firing alerts": ("A",)},
            "headroom-fleet": {"Firing alerts": ("A",), "Alerts": ()},
            "headroom-incident": {"Alert begins to fire": (), "Firing alerts": ("A",)},
        },
    ),
    Empty(
        why="no engine has ended, whose alerts wait",
        over=frozenset({"healthy", "burst", "asleep", "small card"}),
        queries={
            "headroom": {"Firing alerts": ("B",)},
            "headroom-fleet": {"Firing alerts": ("B",)},
            "headroom-incident": {"Alerts": (), "Firing alerts": ("B",)},
        },
    ),
    Empty(
        why="nothing is critical",
        over=EVERYWHERE - LEAKS - {"crash", "restart"},
        queries={"headroom-fleet": {"Alert begins to fire": ()}},
    ),
    Empty(
        why="what was wrong is over",
        over=frozenset({"neighbour", "restart"}),
        queries={
            "headroom": {"Alerts": (), "Firing alerts": ()},
            "headroom-fleet": {"Firing alerts": (), "Alerts": ()},
            "headroom-incident": {"Firing alerts": ()},
        },
    ),
    Empty(
        why="no engine starts anew",
        over=EVERYWHERE - {"restart", "crash"},
        queries={
            "headroom": {"Engine restarted": ()},
            "headroom-incident": {"Engine restarted": (), "XID errors and restarts": ("restarted",)},
        },
    ),
    Empty(
        why="no engine exits",
        over=EVERYWHERE - {"restart", "crash", "engine down"},
        queries={"headroom": {"Engine exited": ()}, "headroom-incident": {"Engine exited": ()}},
    ),
    Empty(
        why="every reading succeeds",
        over=EVERYWHERE - {"restart", "engine down", "crash"},
        queries={"headroom": {"Failed readings per second": ()}},
    ),
    Empty(
        why="no run is sampled long enough for a baseline",
        over=frozenset({"crash", "restart", "sidecar down", "asleep"}),
        queries={"headroom": {"Cost of a request over its baseline, at comparable load": ()}},
    ),
    Empty(
        why="it sleeps",
        over=frozenset({"asleep"}),
        queries={
            "headroom": {"Unreported": ("of the card, since it first served",)},
            "headroom-fleet": {"Engines, worst first": ("H",)},
        },
    ),
    Empty(
        why="what the engine does not say now is unknown",
        over=frozenset({"engine down", "sidecar down"}),
        queries={
            "headroom": {
                "Unreported": (),
                "KV cache capacity": (),
                "Inputs the engine does not offer": (),
            },
            "headroom-fleet": {
                "Engines, worst first": ("B", "H"),
                "Models, worst first": (),
            },
        },
    ),
    Empty(
        why="what the sidecar does not say now is unknown",
        over=frozenset({"sidecar down"}),
        queries={
            "headroom": {
                "Free now": (),
                "Held by others": (),
                "Likely out of memory": (),
                "Out of memory at the earliest": (),
                "Each GPU, and when it will be full": ("A", "B"),
            },
            "headroom-fleet": {
                "Out of memory at the earliest": (),
                "Engines, worst first": ("B", "C", "D", "E", "F", "G", "H"),
            },
        },
    ),
    Empty(
        why="Prometheus scrapes vLLM's own page of one engine alone",
        over=EVERYWHERE - {"leak"},
        queries={
            "headroom": {
                "Time to the first token": (),
                "Requests that fail": ("status 5xx", "{{finished_reason}}"),
            }
        },
    ),
    Empty(
        why="no engine exits with requests",
        over=EVERYWHERE - {"restart", "crash", "engine down"},
        queries={"headroom": {"Requests that fail": ("requests lost at an exit",)}},
    ),
    Empty(
        why="nothing is rolled out",
        over=EVERYWHERE,
        queries={
            board: {"New image": (), "New version of the sidecar": ()}
            for board in ("headroom", "headroom-fleet", "headroom-incident")
        },
    ),
    Empty(
        why="the time shown ends now",
        over=EVERYWHERE,
        queries={
            "headroom": {
                "Headroom: free memory of each GPU": (
                    "GPU {{gpu}} expected",
                    "GPU {{gpu}} at the earliest",
                )
            }
        },
    ),
    Empty(
        why="no scenario has a limit, a probe, a broken GPU, a leak of the host's, or leftovers; none here idles",
        over=EVERYWHERE,
        queries={
            "headroom": {
                "What the engine uses the fullest GPU for": (),
                "Each GPU, and when it will be full": ("F",),
                "Likely out of memory": ("host memory",),
                "Out of memory at the earliest": ("host memory",),
                "What others hold": ("GPU {{gpu}} left behind",),
                "Host memory against its limit": (),
                "Time until the kernel kills": (),
                "Host leak rate": (),
                "XID errors since the sidecar started": (),
                "KV cache in use, with load": ("{{model_name}} engine {{engine}}, held by no request",),
            },
            "headroom-incident": {"XID errors and restarts": ("GPU {{gpu}} XID {{xid}}",)},
        },
    ),
    Empty(
        why="the probe measures the peaks of one engine alone",
        over=EVERYWHERE - {PEAKS},
        queries={
            "headroom": {
                "Peak of a step, by the kind of work": (),
                "Peak of a step over its room": (),
                "Largest request that fits": (),
            }
        },
    ),
    Empty(
        why="it has not slept",
        over=EVERYWHERE - {"asleep"},
        queries={"headroom": {"Kept by an engine that sleeps": ()}},
    ),
)


def expected_empty(dashboard: Json, target: str) -> set[tuple[str, str]]:
    """Return the places and names of the queries that have no data over a target."""
    return {place for empty in EMPTY if target in empty.over for place in places(empty, dashboard)}


def places(empty: Empty, dashboard: Json) -> Iterator[tuple[str, str]]:
    """Yield what is in a line of the table, by place and name; what is not on the dashboard fails."""
    there = [(query.where, query.name) for query in every_query(dashboard)]
    for where, names in empty.queries.get(dashboard["uid"], {}).items():
        meant_places = [(where, name) for name in names] or [place for place in there if place[0] == where]
        assert meant_places, f"there is no panel {where}"
        assert set(meant_places) <= set(there), f"{where} has not all of {names}"
        yield from meant_places
