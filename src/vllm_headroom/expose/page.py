"""The page as a whole: what is to be said first, then why, and who holds what."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from vllm_headroom import catalog
from vllm_headroom.expose import drawing
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.drawing import MARGIN, STYLE, Curve, Forecast, Frame, escaped
from vllm_headroom.expose.view import Event, Incident, View
from vllm_headroom.model import Gpu, Metric, Snapshot, Values, Verdict, part_of, worst
from vllm_headroom.units import duration, gib, instant, size
from vllm_headroom.vocabulary import WORDS, Level

MOST_COLUMNS: Final = 480
"""Of all curves together: two points of 10 characters each make 10 kB, and the page stays below 60."""

LEAST_COLUMNS: Final = 40
MOST_GPUS: Final = 16
HOUR_SECONDS: Final = 3600.0
AHEAD: Final = 0.5
"""With an end in sight, the future that is drawn is half as long as the past, which is an hour at least."""


def figures(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield a figure for each GPU of the engine's whose memory was seen, and one of the load over the first's time."""
    now = snapshot.time_seconds
    owned = snapshot.owned[:MOST_GPUS]
    columns = max(LEAST_COLUMNS, MOST_COLUMNS // max(1, 2 * len(owned)))
    places = {verdict.subject: place for place, verdict in enumerate(view.verdicts)}
    rooms = [
        _room(view, gpu, free, now, columns)
        for gpu in sorted(owned, key=lambda each: places.get(each.reading.called, 0))
        if (free := view.history.free(gpu.reading.uuid))[0]
    ]
    yield f"<div class=rooms>{''.join(room for _, room in rooms)}</div>"
    running = view.history.running()
    if len(running[0]) > 1:
        yield _load(running, columns, now, rooms[0][0] if rooms else (running[0][0], now))


def _room(view: View, gpu: Gpu, free: Curve, now: float, columns: int) -> tuple[tuple[float, float], str]:
    reading, memory = gpu.reading, gpu.reading.memory
    forecast = _forecast(view, gpu, now)
    begin, end = _span(free[0][0], now, forecast)
    curves = free, view.history.free_at_peak(reading.uuid)
    past, peaks = (drawing.thinned(curve, columns, begin=begin) for curve in curves)
    if past and memory is not None:
        past[-1].append((now, memory.free_bytes))
    known = [value for stretch in past for _, value in stretch]
    top = drawing.scale(known, most=None if memory is None else memory.total_bytes)
    frame = Frame(begin=begin, end=end, top=top)
    shapes = [
        drawing.curve(frame, past),
        drawing.line(frame, peaks, kind="peak"),
        *(drawing.upright(frame, event.seconds) for event in view.history.events if _marks(event, reading.called)),
        "" if forecast is None else drawing.ahead(frame, forecast) + drawing.upright(frame, now),
        drawing.zero(frame),
    ]
    title = f"Free memory of {reading.called}, from {_clock(begin)} to {_clock(end)}, down to zero"
    name, room = reading.name.removesuffix(part_of(reading.uuid)).rstrip(), "memory not known now"
    if memory is not None:
        room = f"{size(memory.free_bytes)} of {size(memory.total_bytes)} free; thin line: what peaks left"
    return (begin, end), (
        f"<figure><figcaption><b>{escaped(reading.called)}</b> {escaped(name)}: {room}</figcaption>"
        f"<i>{size(frame.top)}</i>{drawing.picture(frame, shapes, title=title)}"
        f"{_axis(begin, now, end, forecast)}</figure>"
    )


def _marks(event: Event, gpu: str) -> bool:
    """Return whether an event is an alarm of this GPU, or of no GPU; its text begins with its subject."""
    return event.level is Level.ALARM and (not event.text.startswith("GPU ") or event.text.startswith(f"{gpu} "))


def _span(first: float, now: float, forecast: Forecast | None) -> tuple[float, float]:
    """Return the times that the picture begins and ends at."""
    if forecast is None:
        return first, now
    past = max(HOUR_SECONDS, min(now - first, MARGIN * forecast.seconds / AHEAD))
    return now - past, now + AHEAD * past


def _forecast(view: View, gpu: Gpu, now: float) -> Forecast | None:
    labels, memory = (str(gpu.reading.index), gpu.reading.uuid), gpu.reading.memory
    left = view.values.value(catalog.TIME_TO_OOM, *labels)
    if left is None or memory is None:
        return None
    least = view.values.value(catalog.TIME_TO_OOM_LOWER, *labels)
    return Forecast(begin=now, value=memory.free_bytes, seconds=left, least_seconds=least)


def _axis(begin: float, now: float, end: float, forecast: Forecast | None) -> str:
    words = [f"{duration(now - begin)} before", f"now, {_clock(now)}"]
    if forecast is not None:
        oom = now + forecast.seconds
        words.append(f"out of memory {_clock(oom)}" if oom <= end else f"{_clock(end)}; full in {duration(oom - now)}")
    elif end > now:
        words.append("")
    kind = '"axis ahead"' if end > now else "axis"
    return f"<div class={kind}>{''.join(f'<span>{escaped(word)}</span>' for word in words)}</div>"


def _load(running: Curve, columns: int, now: float, span: tuple[float, float]) -> str:
    begin, end = span
    stretches = drawing.thinned(running, columns, begin=begin)
    top = max((value for stretch in stretches for _, value in stretch), default=1.0)
    frame = Frame(begin=begin, end=end, top=MARGIN * top or 1.0, height=40.0)
    title = f"Running requests, from {_clock(begin)} to {_clock(now)}, at most {top:.0f}"
    return (
        f"<figure class=strip><figcaption><b>Load</b>: running requests, at most {top:.0f}</figcaption>"
        f"{drawing.picture(frame, [drawing.curve(frame, stretches)], title=title)}"
        f"{_axis(begin, now, end, None)}</figure>"
    )


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%MZ")


_LEVELS: Final = "".join(
    f".verdicts .{level}{{border-color:var(--{level})}}.{level} b,b.{level}{{color:var(--{level})}}" for level in Level
)
PAGE_STYLE: Final = (
    f"{STYLE}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem;color:var(--ink);"
    "background:var(--ground);overflow-wrap:break-word}h1{font-size:1.1rem;margin:0}"
    "h2{font-size:1.05rem;margin:1.6rem 0 .3rem}p{margin:.3rem 0}a{color:inherit}.dim,figcaption{color:var(--dim)}"
    ".verdicts{list-style:none;margin:1rem 0;padding:0}.verdicts>li{border-left:.35rem solid;padding:.35rem .8rem;"
    "margin:.4rem 0;font-size:1.1rem}.verdicts b{font-size:.8rem;letter-spacing:.05em}"
    f"{_LEVELS}figure{{margin:1rem 0;position:relative}}"
    "figure i{position:absolute;right:0;font:.85rem system-ui,sans-serif;color:var(--dim)}"
    "svg{display:block;width:100%;height:11rem;border-top:1px solid var(--line)}"
    ".strip svg{height:2.5rem}.axis{display:flex;gap:.5rem;justify-content:space-between;color:var(--dim);"
    "font-size:.85rem}.axis.ahead span{flex:1;text-align:right}.axis.ahead span:first-child{text-align:left}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);white-space:nowrap}"
    ".words td:last-child,tbody th{white-space:normal}.words td:last-child{min-width:16rem}"
    ".figures td,.figures th~th{text-align:right;font-variant-numeric:tabular-nums}"
    ".rooms{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));column-gap:1.5rem}"
    ".notice{border:1px solid var(--warning);padding:.4rem .8rem}"
    "@media print{body{max-width:none}svg{break-inside:avoid}}"
)
_HASH: Final = base64.b64encode(hashlib.sha256(PAGE_STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_SHAPES: Final = {
    Level.GOOD: ("#1a7f37", "<path d='M4 9l3 3 6-7' fill='none' stroke='#fff' stroke-width='2'/>"),
    Level.UNKNOWN: ("#57606a", "<path d='M5 8h6' stroke='#fff' stroke-width='2'/>"),
    Level.WARNING: ("#8a5a00", "<path d='M8 3v6M8 11v2' stroke='#fff' stroke-width='2'/>"),
    Level.ALARM: ("#b42318", "<path d='M4 4l8 8M12 4l-8 8' stroke='#fff' stroke-width='2'/>"),
}


def icon(level: Level) -> str:
    """Return the address of a picture of the level, told apart by its shape as well."""
    colour, shape = _SHAPES[level]
    picture = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='8' fill='{colour}'/>"
        f"{shape}</svg>"
    )
    return f"data:image/svg+xml,{quote(picture, safe='')}"


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
