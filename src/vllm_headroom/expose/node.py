"""Show several engines on one page, worst first, and in one JSON document."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import parse_qs, quote

from msgspec import Struct

from vllm_headroom.expose.answers import Handler, Request, Response, respond_text
from vllm_headroom.expose.assets import PAGE_STYLE, SCRIPT, build_icon
from vllm_headroom.expose.drawing import escape_text, render_text
from vllm_headroom.expose.page import (
    DOT,
    LINKED_PATHS,
    MIN_REFRESH_SECONDS,
    find_advice,
    find_key_figure,
    render_age,
    render_page,
    render_since,
    respond_html,
)
from vllm_headroom.expose.snapshot import build_document, respond_snapshot
from vllm_headroom.expose.view import View
from vllm_headroom.model import EngineName, find_worst_level
from vllm_headroom.vocabulary import LEVEL_NAMES, Level, Situation

QUERY: Final = "engine"
"""The query parameter that selects an engine by name, as in --engine."""


class EngineView(Struct, frozen=True, kw_only=True):
    """An engine and what its own page shows."""

    name: EngineName
    view: View


class OtherEngine(Struct, frozen=True, kw_only=True):
    """An engine that is not watched, and why."""

    name: EngineName
    problem: str


class NodeView(Struct, frozen=True, kw_only=True):
    """All engines on a machine, as shown by its page and its JSON document."""

    version: str
    host: str
    interval_seconds: float
    engines: tuple[EngineView, ...]
    own_sidecar: tuple[OtherEngine, ...]
    unreadable: tuple[OtherEngine, ...]
    seconds: float | None
    """When the latest tick began, in seconds since the epoch. None before the first tick."""
    age_seconds: float = 0.0
    stall_reason: str | None = None
    """Why the sampling loop is unhealthy, or None while it is healthy."""

    def sort_engines(self) -> list[EngineView]:
        """Return the engines sorted by level and situation, worst first, then by name."""
        levels = tuple(Level)
        situations = tuple(Situation)
        return sorted(
            self.engines,
            key=lambda engine: (
                -levels.index(find_worst_level(engine.view.shown_verdicts)),
                situations.index(engine.view.shown_verdicts[0].situation),
                engine.name.text,
            ),
        )

    def find_engines(self, text: str) -> list[EngineView]:
        """Return the engines with this name: NAMESPACE/POD[/CONTAINER], a unit or a URL."""
        return [engine for engine in self.engines if text in list_engine_names(engine.name)]


def list_engine_names(name: EngineName) -> tuple[str, ...]:
    """Return the names by which an engine can be selected, the usual name first."""
    if name.pod is not None and name.container:
        return name.text, f"{name.text}/{name.container}"
    return (name.text,)


def respond_node_page(view: NodeView, request: Request) -> Response:
    """Return the page of all engines or, with a query, of one."""
    wanted = _read_wanted(request)
    if wanted is None:
        return respond_html(render_node(view))
    engine = _find_one(view, wanted)
    if isinstance(engine, Response):
        return engine
    return respond_html(render_page(engine.view, request.query))


def respond_node_snapshot(view: NodeView, request: Request) -> Response:
    """Return the document about all engines or, with a query, about one."""
    wanted = _read_wanted(request)
    if wanted is None:
        body = json.dumps(build_node_document(view)).encode()
        return Response(status=200, body=body, content_type="application/json")
    engine = _find_one(view, wanted)
    return engine if isinstance(engine, Response) else respond_snapshot(engine.view)


def respond_node_metrics(
    view: NodeView,
    request: Request,
    metrics: Handler,
    find_metrics: Callable[[EngineName], Handler],
) -> Response:
    """Return the metrics of all engines or, with a query, of one.

    The metrics of one engine are those that a separate sidecar would serve. `metrics` is the
    handler for all engines; `find_metrics` returns the handler for one engine.
    """
    wanted = _read_wanted(request)
    if wanted is None:
        return metrics(request)
    engine = _find_one(view, wanted)
    if isinstance(engine, Response):
        return engine
    return find_metrics(engine.name)(request)


def build_node_document(view: NodeView) -> dict[str, Any]:
    """Return one document about all engines: the watched ones, worst first, and the others."""
    return {
        "headroom_node": 1,
        "version": view.version,
        "host": view.host,
        "t": view.seconds,
        "age_seconds": None if view.seconds is None else view.age_seconds,
        "engines": [
            {
                "engine": engine.name.text,
                **_describe_name(engine.name),
                "snapshot": build_document(engine.view),
            }
            for engine in view.sort_engines()
        ],
        "own_sidecar": [_describe_other(other) for other in view.own_sidecar],
        "unreadable": [_describe_other(other) for other in view.unreadable],
    }


def _describe_name(name: EngineName) -> dict[str, str | None]:
    """Return an engine's name as in the JSON snapshot; unknown parts are null."""
    return {
        "namespace": name.namespace,
        "pod": name.pod,
        "container": name.container,
        "unit": name.unit,
        "engine_url": name.engine_url or None,
    }


def _describe_other(other: OtherEngine) -> dict[str, str | None]:
    return {
        "engine": other.name.text,
        **_describe_name(other.name),
        "problem": other.problem or None,
    }


def _read_wanted(request: Request) -> str | None:
    """Return the engine's name in the query, or None if there is none."""
    return next(iter(parse_qs(request.query).get(QUERY, ())), None)


def _find_one(view: NodeView, wanted: str) -> EngineView | Response:
    """Return the engine with this name.

    Returns an error response if not exactly one engine has this name.
    """
    engines = view.find_engines(wanted)
    if len(engines) == 1:
        return engines[0]
    if engines:
        names = ", ".join(list_engine_names(engine.name)[-1] for engine in engines)
        return respond_text(404, f"several engines have this name: {names}")
    names = ", ".join(engine.name.text for engine in view.sort_engines()) or "none"
    return respond_text(404, f"no such engine is watched here; watched: {names}")


def render_node(view: NodeView) -> str:
    """Return the page that lists the engines; its script keeps it up to date."""
    engines = view.sort_engines()
    # The first verdict of an engine is its worst.
    level = find_worst_level(
        verdict for engine in engines for verdict in engine.view.shown_verdicts[:1]
    )
    host = escape_text(view.host)
    rows = "".join(_render_engine(engine) for engine in engines)
    others = "".join(_render_others(view))
    stall = ""
    if view.stall_reason is not None:
        level = Level.ALARM
        reason = escape_text(view.stall_reason)
        stall = f"<p class=notice>The daemon does not sample: {reason}; all below is old.</p>"
    links = DOT.join(f'<a href="{path}">{path}</a>' for path in LINKED_PATHS)
    # A shorter interval would leave too little time to read the page. With a shorter interval, the
    # page could also show the same sample twice.
    refresh_seconds = max(MIN_REFRESH_SECONDS, round(view.interval_seconds))
    engine_count = "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{LEVEL_NAMES[level]}: {engine_count} on {host}{DOT}vllm-headroom</title>"
        f'<link rel="icon" href="{build_icon(level)}">'
        f"<style>{PAGE_STYLE}</style></head>"
        f"<body data-seconds={refresh_seconds}>"
        f"<header><p>vllm-headroom{DOT}{host}</p>"
        f"{render_age(view.seconds, view.age_seconds, view.version)}{stall}</header>"
        f"<main><h1>{engine_count} on {host}: {_count_levels(engines)}</h1>"
        f"<ul class=verdicts>{rows}</ul>{others}</main>"
        f"<footer><p>{links}</p></footer>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


COUNT_NAMES: Final = {
    Level.ALARM: ("alarm", "alarms"),
    Level.WARNING: ("warning", "warnings"),
    Level.UNKNOWN: ("not known", "not known"),
    Level.GOOD: ("OK", "OK"),
}
"""The words (singular and plural) for engines at each level, worst level first."""


def _count_levels(engines: list[EngineView]) -> str:
    """Return how many engines are at each level; levels without engines are omitted."""
    counts = Counter(engine.view.shown_verdicts[0].level for engine in engines)
    return ", ".join(
        f"{counts[level]} {names[counts[level] > 1]}"
        for level, names in COUNT_NAMES.items()
        if counts[level]
    )


def _render_engine(engine: EngineView) -> str:
    """Return a line with an engine's worst verdict, key figure and page link.

    The line also shows when a problem began and what to do. A problem is an alarm, a warning or an
    unreadable engine.
    """
    worst = engine.view.shown_verdicts[0]
    name = escape_text(engine.name.text)
    # The longest name is used. The longest name is unique even if two containers in a pod run
    # engines.
    link = f"/?{QUERY}={quote(list_engine_names(engine.name)[-1], safe='')}"
    sentence = render_text(worst.sentence)
    number, caption = find_key_figure(engine.view, worst)
    # Most sentences already contain the number, or both ends if the number is a range. In a crash
    # loop, the sentence contains the number of exits.
    is_in_sentence = all(part in worst.sentence for part in number.split(" to "))
    if not is_in_sentence and worst.situation is not Situation.CRASH_LOOP:
        sentence += f" {render_text(number)} {render_text(caption)}."
    if worst.level in (Level.ALARM, Level.WARNING) or worst.situation is Situation.BLIND:
        advice = escape_text(find_advice(engine.view, worst))
        sentence += f"{render_since(engine.view, worst)}<br><small>{advice}</small>"
    return (
        f"<li class={worst.level}><b>{LEVEL_NAMES[worst.level]}</b> "
        f'<a href="{link}">{name}</a> {sentence}</li>'
    )


def _render_others(view: NodeView) -> Iterator[str]:
    """Yield the lists of engines that are not watched."""
    if view.own_sidecar:
        names = escape_text(", ".join(other.name.text for other in view.own_sidecar))
        yield f"<h2>With their own sidecar</h2><p>{names}</p>"
    if view.unreadable:
        yield "<h2>Not watched</h2><ul>"
        for other in view.unreadable:
            name = escape_text(other.name.text)
            yield f"<li>{name}: {escape_text(other.problem)}</li>"
        yield "</ul>"
