"""Free memory of each GPU down to zero, with what is expected, and the load beneath it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import MARGIN, Curve, Forecast, Frame, escaped
from vllm_headroom.expose.history import Event
from vllm_headroom.expose.view import View
from vllm_headroom.model import Gpu, Snapshot, part_of
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import Level

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
