"""Render the page: verdicts first, then curves, then tables."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from vllm_headroom import catalog
from vllm_headroom.expose import drawing as svg
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.drawing import MARGIN, STYLE, Curve, Forecast, Frame, escape_text
from vllm_headroom.expose.view import View
from vllm_headroom.model import Gpu, HostMemory, Metric, Snapshot, Values, Verdict, find_part
from vllm_headroom.units import format_duration, format_gib, format_instant, format_size
from vllm_headroom.vocabulary import WORDS, Level

MOST_COLUMNS: Final = 480
"""Of all curves together: two points of 10 characters each are 10 kB, and the page stays below 60 kB."""

LEAST_COLUMNS: Final = 40
MOST_GPUS: Final = 16
HOUR_SECONDS: Final = 3600.0
_Room = tuple[int, int]
_Left = list[float | None]
_Figure = tuple[tuple[float, float], str]
AHEAD: Final = 0.5
"""With a forecast, the future is half as long as the past, which is at least an hour."""


def draw_figures(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield a figure of the room on each of the engine's GPUs and the host, and one of the load over the same time."""
    now = snapshot.time_seconds
    owned = snapshot.owned[:MOST_GPUS]
    has_host = bool(view.history.host()[0])
    columns = max(LEAST_COLUMNS, MOST_COLUMNS // max(1, 2 * len(owned) + has_host))
    places = {verdict.subject: place for place, verdict in enumerate(view.verdicts)}
    rooms = [
        _draw_gpu(view, gpu, columns)
        for gpu in sorted(owned, key=lambda each: places.get(each.reading.called, 0))
        if view.history.free(gpu.reading.uuid)[0]
    ]
    if has_host:
        rooms.append(_draw_host(view, snapshot.host or HostMemory(), columns))
    yield f"<div class=rooms>{''.join(room for _, room in rooms)}</div>"
    running = view.history.running()
    if len(running[0]) > 1:
        yield _draw_load(running, columns, now, rooms[0][0] if rooms else (running[0][0], now))


def _draw_gpu(view: View, gpu: Gpu, columns: int) -> _Figure:
    reading, memory = gpu.reading, gpu.reading.memory
    room = None if memory is None else (memory.free_bytes, memory.total_bytes)
    labels, name = (str(reading.index), reading.uuid), reading.name.removesuffix(find_part(reading.uuid)).rstrip()
    left = [view.values.value(metric, *labels) for metric in (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER)]
    curves = view.history.free(reading.uuid), view.history.free_at_peak(reading.uuid)
    return _draw_room(view, (reading.called, name), curves, room, left, columns=columns)


def _draw_host(view: View, host: HostMemory, columns: int) -> _Figure:
    room = None if host.room_bytes is None else (host.room_bytes, host.limit_bytes or 0)
    left = [view.values.value(metric) for metric in (catalog.HOST_TIME_TO_OOM, catalog.HOST_TIME_TO_OOM_LOWER)]
    return _draw_room(view, ("Host memory", ""), (view.history.host(), ((), ())), room, left, columns=columns)


def _draw_room(
    view: View, names: tuple[str, str], curves: tuple[Curve, Curve], room: _Room | None, left: _Left, *, columns: int
) -> _Figure:
    """Return the span and the figure of free memory and its peaks; `room` is what is free now, and of how much."""
    called, name = names
    now = 0.0 if view.snapshot is None else view.snapshot.time_seconds
    forecast = None
    if left[0] is not None and room is not None:
        forecast = Forecast(begin=now, value=room[0], seconds=left[0], least_seconds=left[1])
    begin, end = _find_span(curves[0][0][0], now, forecast)
    past, peaks = (svg.thin_curve(curve, columns, begin=begin) for curve in curves)
    if past and room is not None:
        past[-1].append((now, room[0]))
    known = [value for stretch in past for _, value in stretch]
    top = svg.find_top(known, most=None if room is None else room[1])
    frame = Frame(begin=begin, end=end, top=top)
    shapes = [
        svg.draw_curve(frame, past),
        svg.draw_line(frame, peaks, kind="peak"),
        *(  # alarms of this GPU or of none: a text begins with its subject
            svg.draw_mark(frame, event.seconds)
            for event in view.history.events
            if (
                event.level is Level.ALARM
                and (not event.text.startswith("GPU ") or event.text.startswith(f"{called} "))
            )
        ),
        "" if forecast is None else svg.draw_forecast(frame, forecast) + svg.draw_mark(frame, now),
        svg.draw_zero(frame),
    ]
    title = f"{called}: free memory from {_format_clock(begin)} to {_format_clock(end)}, down to zero"
    text = "memory not known now"
    if room is not None:
        text = f"{format_size(room[0])} of {format_size(room[1])} free"
        text += "; thin line: lowest free memory per minute" if peaks else ""
    return (begin, end), (
        f"<figure><figcaption><b>{escape_text(called)}</b> {escape_text(name)}: {text}</figcaption>"
        f"<i>{format_size(frame.top)}</i>{svg.draw_picture(frame, shapes, title=title)}"
        f"{_draw_axis(begin, now, end, forecast)}</figure>"
    )


def _find_span(first: float, now: float, forecast: Forecast | None) -> tuple[float, float]:
    """Return the first and last time of the picture."""
    if forecast is None:
        return first, now
    past = max(HOUR_SECONDS, min(now - first, MARGIN * forecast.seconds / AHEAD))
    return now - past, now + AHEAD * past


def _draw_axis(begin: float, now: float, end: float, forecast: Forecast | None) -> str:
    words = [f"{format_duration(now - begin)} before", f"now, {_format_clock(now)}"]
    if forecast is not None:
        oom = now + forecast.seconds
        later = f"{_format_clock(end)}; full in {format_duration(oom - now)}"
        words.append(f"out of memory {_format_clock(oom)}" if oom <= end else later)
    elif end > now:
        words.append("")
    kind = '"axis ahead"' if end > now else "axis"
    return f"<div class={kind}>{''.join(f'<span>{escape_text(word)}</span>' for word in words)}</div>"


def _draw_load(running: Curve, columns: int, now: float, span: tuple[float, float]) -> str:
    begin, end = span
    stretches = svg.thin_curve(running, columns, begin=begin)
    top = max((value for stretch in stretches for _, value in stretch), default=1.0)
    frame = Frame(begin=begin, end=end, top=MARGIN * top or 1.0, height=40.0)
    title = f"Running requests, from {_format_clock(begin)} to {_format_clock(now)}, at most {top:.0f}"
    return (
        f"<figure class=strip><figcaption><b>Load</b>: running requests, at most {top:.0f}</figcaption>"
        f"{svg.draw_picture(frame, [svg.draw_curve(frame, stretches)], title=title)}"
        f"{_draw_axis(begin, now, end, None)}</figure>"
    )


def _format_clock(seconds: float) -> str:
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


def build_icon(level: Level) -> str:
    """Return the data URL of the level's icon; levels differ in colour and shape."""
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
"""A person reads for longer than a short interval."""

LINKS: Final = " \N{MIDDLE DOT} ".join(
    f'<a href="{link}">{link}</a>' for link in ("/metrics", "/snapshot.json", "/healthz", "/readyz")
)


def respond_html(page: str) -> Response:
    """Return the page as an answer that loads nothing and may not be framed."""
    return Response(
        status=200, body=page.encode(errors="replace"), content_type="text/html; charset=utf-8", headers=_HEADERS
    )


def render_page(view: View) -> str:
    """Return the HTML page, which loads and runs nothing and refreshes itself."""
    notice = f'<p class="notice">{escape_text(view.notice)}</p>' if view.notice else ""
    first = view.shown[0]
    headline = escape_text(f"{first.subject} {first.situation.replace('_', ' ')}")
    names = {labels[0]: None for labels in view.values.of(catalog.ENGINE_INFO)}
    models = f": {escape_text(', '.join(names))}" if names else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="refresh" content="{max(LEAST_REFRESH_SECONDS, round(view.interval_seconds))}">'
        f"<title>{WORDS[first.level]}: {headline} \N{MIDDLE DOT} vllm-headroom</title>"
        f'<link rel="icon" href="{build_icon(first.level)}"><style>{PAGE_STYLE}</style></head><body>'
        f"<header><h1>vllm-headroom{models}</h1><p class=dim>{_describe_age(view)}</p>{notice}</header>"
        f"<main><ul class=verdicts>{''.join(_render_sentence(view, each) for each in view.shown)}</ul>"
        f"{''.join(_render_rest(view))}</main><footer><p>{LINKS}</p></footer></body></html>\n"
    )


def _render_rest(view: View) -> Iterator[str]:
    if view.snapshot is not None:
        yield from draw_figures(view, view.snapshot)
        values = view.values
        yield _render_table(
            "Who holds the memory", ("GPU", *HOLDERS, "free", "total"), _list_gpus(values), kind="figures"
        )
        titles = ("processes", "resident", "swapped out", "leak", "growth an hour")
        yield _render_table("Host memory by process", titles, _list_roles(values), kind="figures")
        head = ("engine", *(title for title, _, _ in ENGINE))
        yield _render_table("Engines", head, _list_engines(values), kind="figures")
        head = ("source", "last reading", "took", "last worked", "cause and cure")
        yield _render_table("Sources", head, _list_sources(values, view.snapshot), kind="words")
    if view.last_incident is not None:
        last = view.last_incident
        why = "" if last.sentence is None else f" <b>{escape_text(last.sentence)}</b>"
        yield (
            f"<h2>Last incident</h2><p>{format_instant(last.seconds)}: the engine {escape_text(last.what)}.{why}"
            f" <code>{escape_text(last.command)}</code>, run in the sidecar's container, has the evidence.</p>"
        )
    if view.history.events:
        yield "<h2>What changed</h2><ul>"
        for event in reversed(view.history.events[-10:]):
            word = f"<b class={event.level}>{WORDS[event.level]}</b>"
            yield f"<li>{word} {format_instant(event.seconds)} {escape_text(event.text)}</li>"
        yield "</ul>"


def _render_sentence(view: View, verdict: Verdict) -> str:
    where = view.find_runbook(verdict.alert)
    link = "" if where is None else f' <a href="{escape_text(where)}">What&nbsp;to&nbsp;do</a>'
    return f"<li class={verdict.level}><b>{WORDS[verdict.level]}</b> {escape_text(verdict.sentence)}{link}</li>"


def _describe_age(view: View) -> str:
    if view.snapshot is None:
        return f"version {escape_text(view.version)}"
    age = format_duration(view.age_seconds)
    return f"seen {format_instant(view.snapshot.time_seconds)}, {age} ago; version {escape_text(view.version)}"


HOLDERS: Final = ("engine", "other", "unattributed")
NOT_KNOWN: Final = "not known"


def _list_gpus(values: Values) -> Iterator[tuple[str, ...]]:
    for gpu, uuid, name, attribution in values.of(catalog.GPU_INFO):
        held = (values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, holder) for holder in HOLDERS)
        room = (values.value(metric, gpu, uuid) for metric in (catalog.GPU_MEMORY_FREE, catalog.GPU_MEMORY_TOTAL))
        which = gpu if find_part(uuid) in name else f"{gpu} {find_part(uuid)}"
        whose = f"the engine's by {attribution}" if attribution else "not the engine's"
        yield (f"{which} {name}, {whose}", *map(_format_gib, (*held, *room)))


def _list_roles(values: Values) -> Iterator[tuple[str, ...]]:
    for (role,), resident in values.of(catalog.HOST_MEMORY).items():
        held = map(_format_gib, (resident, values.value(catalog.HOST_SWAP, role)))
        rate = values.value(catalog.HOST_LEAK_RATE, role)
        growth = "" if rate is None else format_size(HOUR_SECONDS * rate)
        yield (role, *held, values.state(catalog.HOST_LEAK_STATE, role) or NOT_KNOWN, growth)


def _list_engines(values: Values) -> Iterator[tuple[str, ...]]:
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


def _list_sources(values: Values, snapshot: Snapshot) -> Iterator[tuple[str, ...]]:
    failures = {str(failure.source): failure for failure in snapshot.failures}
    for (source,), up in values.of(catalog.SOURCE_UP).items():
        took = values.value(catalog.SOURCE_READ_SECONDS, source)
        worked = values.value(catalog.SOURCE_LAST_SUCCESS, source)
        ago = "never" if worked is None else f"{format_duration(max(0.0, snapshot.time_seconds - worked))} before"
        failure = failures.get(source)
        yield (
            source,
            "answers" if up else "failed",
            NOT_KNOWN if took is None else f"{1000 * took:.1f} ms",
            "this time" if up else ago,
            "" if failure is None else f"{failure.reason}: {failure.message}",
        )


def _render_table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, kind: str) -> str:
    """Return a table of this class with a heading, empty without rows."""
    lines = "".join(
        f"<tr><th scope=row>{escape_text(first)}</th>{''.join(f'<td>{escape_text(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    ).replace("<td>failed</td>", "<td><b class=alarm>failed</b></td>")
    titles = "".join(f"<th scope=col>{escape_text(each)}</th>" for each in head)
    if not lines:
        return ""
    return (
        f'<h2>{escape_text(title)}</h2><div class=wide role=region tabindex=0 aria-label="{escape_text(title)}">'
        f"<table class={kind}><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _format_gib(n_bytes: float | None) -> str:
    return NOT_KNOWN if n_bytes is None else format_gib(n_bytes)
