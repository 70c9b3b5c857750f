"""The page as a whole: what is to be said first, then why, and who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.drawing import escaped
from vllm_headroom.expose.page.figures import figures
from vllm_headroom.expose.page.style import PAGE_STYLE, POLICY, icon
from vllm_headroom.expose.view import Incident, View
from vllm_headroom.model import Metric, Snapshot, Values, Verdict, part_of, worst
from vllm_headroom.units import duration, gib, instant
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


def html(page: str) -> Response:
    """Return the page as an answer that may load nothing, and be shown in no frame."""
    return Response(
        status=200, body=page.encode(errors="replace"), content_type="text/html; charset=utf-8", headers=_HEADERS
    )


def landing_page(view: View) -> str:
    """Return the HTML page, which loads nothing, runs nothing and refreshes itself."""
    notice = f'<p class="notice">{escaped(view.notice)}</p>' if view.notice else ""
    level = worst(view.said)
    first = next(each for each in view.said if each.level == level)
    names = {labels[0]: None for labels in view.values.of(catalog.ENGINE_INFO)}
    models = f": {escaped(', '.join(names))}" if names else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="refresh" content="{max(LEAST_REFRESH_SECONDS, round(view.interval_seconds))}">'
        f"<title>{WORDS[level]}: {escaped(first.subject)} \N{MIDDLE DOT} vllm-headroom</title>"
        f'<link rel="icon" href="{icon(level)}"><style>{PAGE_STYLE}</style></head><body>'
        f"<header><h1>vllm-headroom{models}</h1><p class=dim>{_when(view)}</p>{notice}</header>"
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
            yield f"<li>{word} {instant(event.seconds)} {escaped(event.text)}</li>"
        yield "</ul>"


def _incident(last: Incident) -> str:
    why = "" if last.reason is None else f" ({escaped(last.reason)})"
    return (
        f"<h2>Last incident</h2><p>{instant(last.seconds)}: the engine {escaped(last.what)}{why}."
        f" <code>{escaped(last.command)}</code>, run in the sidecar's container, says why.</p>"
    )


def _sentence(view: View, verdict: Verdict) -> str:
    where = view.runbook(verdict.alert)
    link = "" if where is None else f' <a href="{escaped(where)}">What&nbsp;to&nbsp;do</a>'
    return f"<li class={verdict.level}><b>{WORDS[verdict.level]}</b> {escaped(verdict.sentence)}{link}</li>"


def _when(view: View) -> str:
    if view.snapshot is None:
        return f"version {escaped(view.version)}"
    age = duration(view.age_seconds)
    return f"seen {instant(view.snapshot.time_seconds)}, {age} ago; version {escaped(view.version)}"


HOLDERS: Final = ("engine", "other", "unattributed")
NOT_KNOWN: Final = "not known"


def tables(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield the tables that have rows."""
    values = view.values
    yield _table("Who holds the memory", ("GPU", *HOLDERS, "free", "total"), _gpus(values), kind="figures")
    yield _table("Engines", ("engine", *(title for title, _, _ in ENGINE)), _engines(values), kind="figures")
    head = ("source", "last reading", "took", "last worked", "cause and cure")
    yield _table("Sources", head, _sources(values, snapshot), kind="words")


def _gpus(values: Values) -> Iterator[tuple[str, ...]]:
    for gpu, uuid, name, attribution in values.of(catalog.GPU_INFO):
        held = (values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, holder) for holder in HOLDERS)
        room = (values.value(metric, gpu, uuid) for metric in (catalog.GPU_MEMORY_FREE, catalog.GPU_MEMORY_TOTAL))
        which = gpu if part_of(uuid) in name else f"{gpu} {part_of(uuid)}"
        whose = f"the engine's by {attribution}" if attribution else "not the engine's"
        yield (f"{which} {name}, {whose}", *map(_gib, (*held, *room)))


def _engines(values: Values) -> Iterator[tuple[str, ...]]:
    for model_name, engine, _profile in values.of(catalog.ENGINE_INFO):
        shown = (
            NOT_KNOWN if (value := values.value(metric, model_name, engine)) is None else form.format(value)
            for _, metric, form in ENGINE
        )
        yield (f"{model_name} / {engine}", *shown)


ENGINE: Final[tuple[tuple[str, Metric, str], ...]] = (
    ("running", catalog.ENGINE_RUNNING, "{:.0f}"),
    ("waiting", catalog.ENGINE_WAITING, "{:.0f}"),
    ("KV cache used", catalog.ENGINE_KV_USED, "{:.1%}"),
    ("prefix hits, 5 min", catalog.ENGINE_PREFIX_HIT_RATIO, "{:.1%}"),
    ("more requests fit", catalog.ENGINE_ADDITIONAL_REQUESTS, "{:.0f}"),
)


def _sources(values: Values, snapshot: Snapshot) -> Iterator[tuple[str, ...]]:
    failures = {str(failure.source): failure for failure in snapshot.failures}
    for (source,), up in values.of(catalog.SOURCE_UP).items():
        took = values.value(catalog.SOURCE_READ_SECONDS, source)
        worked = values.value(catalog.SOURCE_LAST_SUCCESS, source)
        ago = "never" if worked is None else f"{duration(max(0.0, snapshot.time_seconds - worked))} before"
        failure = failures.get(source)
        yield (
            source,
            "answers" if up else "failed",
            NOT_KNOWN if took is None else f"{1000 * took:.1f} ms",
            "this time" if up else ago,
            "" if failure is None else f"{failure.reason}: {failure.message}",
        )


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, kind: str) -> str:
    """Return a table of this class with a heading, nothing without rows."""
    lines = "".join(
        f"<tr><th scope=row>{escaped(first)}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    ).replace("<td>failed</td>", "<td><b class=alarm>failed</b></td>")
    titles = "".join(f"<th scope=col>{escaped(each)}</th>" for each in head)
    if not lines:
        return ""
    return (
        f'<h2>{escaped(title)}</h2><div class=wide role=region tabindex=0 aria-label="{escaped(title)}">'
        f"<table class={kind}><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _gib(n_bytes: float | None) -> str:
    return NOT_KNOWN if n_bytes is None else gib(n_bytes)
