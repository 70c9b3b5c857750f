"""The page as a whole: what is to be said first, then why."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Answer, Header
from vllm_headroom.expose.page.figures import figures
from vllm_headroom.expose.page.style import PAGE_STYLE, POLICY, icon
from vllm_headroom.expose.page.tables import tables
from vllm_headroom.expose.view import Incident, View
from vllm_headroom.model import Verdict, worst
from vllm_headroom.units import duration, instant
from vllm_headroom.vocabulary import WORDS

_HEADERS: Final[tuple[Header, ...]] = (
    NO_SNIFF,
    NO_STORE,
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", POLICY),
)
LEAST_REFRESH_SECONDS: Final = 5
"""A person reads for longer than an interval of a second lasts."""

LINKS: Final = " \N{MIDDLE DOT} ".join(
    f'<a href="{link}">{link}</a>' for link in ("/metrics", "/snapshot.json", "/healthz", "/readyz")
)


def html(page: str) -> Answer:
    """Return the page as an answer that may load nothing, and be shown in no frame."""
    return Answer(status=200, body=page.encode(), content_type="text/html; charset=utf-8", headers=_HEADERS)


def landing_page(view: View) -> str:
    """Return the HTML page, which loads nothing, runs nothing and refreshes itself."""
    notice = f'<p class="notice">{escape(view.notice)}</p>' if view.notice else ""
    level = worst(view.said)
    first = next(each for each in view.said if each.level == level)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="refresh" content="{max(LEAST_REFRESH_SECONDS, round(view.interval_seconds))}">'
        f"<title>{WORDS[level]}: {escape(first.subject)} \N{MIDDLE DOT} vllm-headroom</title>"
        f'<link rel="icon" href="{icon(level)}"><style>{PAGE_STYLE}</style></head><body>'
        f"<header><h1>vllm-headroom{_models(view)}</h1><p class=dim>{_when(view)}</p>{notice}</header>"
        f"<main><ul class=verdicts>{''.join(_sentence(view, each) for each in view.said)}</ul>"
        f"{''.join(_rest(view))}</main><footer><p>{LINKS}</p></footer></body></html>\n"
    )


def _rest(view: View) -> Iterator[str]:
    if view.snapshot is not None:
        yield from figures(view, view.snapshot)
        yield from tables(view, view.snapshot)
    if view.last_incident is not None:
        yield _incident(view.last_incident)
    if view.history.events:
        yield "<h2>What changed</h2><ul>"
        for event in reversed(view.history.events[-10:]):
            word = f"<b class={event.level}>{WORDS[event.level]}</b>"
            yield f"<li>{word} {instant(event.seconds)} {escape(event.text)}</li>"
        yield "</ul>"


def _incident(last: Incident) -> str:
    why = "" if last.reason is None else f" ({escape(last.reason)})"
    return (
        f"<h2>Last incident</h2><p>{instant(last.seconds)}: the engine {escape(last.what)}{why}."
        f" <code>{escape(last.command)}</code>, run in the sidecar's container, says why.</p>"
    )


def _sentence(view: View, verdict: Verdict) -> str:
    where = view.runbook(verdict.alert)
    link = "" if where is None else f' <a href="{escape(where)}">What&nbsp;to&nbsp;do</a>'
    return f"<li class={verdict.level}><b>{WORDS[verdict.level]}</b> {escape(verdict.sentence)}{link}</li>"


def _models(view: View) -> str:
    names = {labels[0]: None for labels in view.values.of(catalog.ENGINE_INFO)}
    return f": {escape(', '.join(names))}" if names else ""


def _when(view: View) -> str:
    if view.snapshot is None:
        return f"version {escape(view.version)}"
    age = duration(view.age_seconds)
    return f"seen {instant(view.snapshot.time_seconds)}, {age} ago; version {escape(view.version)}"
