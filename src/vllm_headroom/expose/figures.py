"""Draw the free memory of GPUs and host, and the load, over the last day."""

from collections.abc import Iterator
from datetime import UTC, datetime
from operator import itemgetter
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose import drawing as svg
from vllm_headroom.expose.drawing import MARGIN, Curve, Forecast, Frame, escape_text
from vllm_headroom.expose.view import View
from vllm_headroom.model import Snapshot, find_part
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import Level

MOST_COLUMNS: Final = 480
"""Of all curves together: two points of 10 characters each are 10 kB, and the page stays below 60 kB."""

LEAST_COLUMNS: Final = 32
MOST_GPUS: Final = 16
HOUR_SECONDS: Final = 3600.0
_Figure = tuple[Frame, str]
_Room = tuple[int, int]
_Left = tuple[float | None, float | None]
LEGEND: Final = (
    "<span><i class=free></i>free memory</span><span><i class=low></i>its lowest value per minute</span>"
    "<span><i class=to></i>forecast to zero, with its earliest time</span><span><i class=at></i>an alarm, or now</span>"
)


def draw_figures(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield a figure of the room on each of the engine's GPUs and the host, and one of the load over the same time."""
    curve, value, owned, host = (
        view.history.read_curve,
        view.values.value,
        snapshot.owned_gpus[:MOST_GPUS],
        snapshot.host,
    )
    host_curve, running = curve("host"), curve("running")
    columns = max(LEAST_COLUMNS, MOST_COLUMNS // max(1, 2 * len(owned) + bool(host_curve[0])))
    places = {verdict.subject: place for place, verdict in enumerate(view.verdicts)}
    drawn: list[tuple[int, _Figure]] = []
    for reading in (gpu.reading for gpu in owned):
        curves = curve(f"free {reading.uuid}"), curve(f"peak {reading.uuid}")
        if not curves[0][0]:
            continue
        room = (
            None
            if reading.memory is None
            else (reading.memory.free_bytes, reading.memory.total_bytes)
        )
        labels, name = (
            (str(reading.index), reading.uuid),
            reading.name.removesuffix(find_part(reading.uuid)).rstrip(),
        )
        left = value(catalog.TIME_TO_OOM, *labels), value(catalog.TIME_TO_OOM_LOWER, *labels)
        figure = _draw_room(view, (reading.display_name, name), curves, room, left, columns=columns)
        drawn.append((places.get(reading.display_name, len(places)), figure))
    if host_curve[0]:
        room = (
            None
            if host is None or host.room_bytes is None
            else (host.room_bytes, host.limit_bytes or 0)
        )
        left = value(catalog.HOST_TIME_TO_OOM), value(catalog.HOST_TIME_TO_OOM_LOWER)
        figure = _draw_room(
            view, ("Host memory", ""), (host_curve, ((), ())), room, left, columns=columns
        )
        drawn.append((0 if places.get("host memory") == 0 else len(places), figure))
    rooms = [figure for _, figure in sorted(drawn, key=itemgetter(0))]
    if rooms:
        yield f"{rooms[0][1]}<p class=key>{LEGEND}</p>"
    if len(running[0]) > 1:
        yield _draw_load(running, columns, snapshot.time_seconds, rooms[0][0] if rooms else None)
    if rooms[1:]:
        yield f"<div class=rooms>{''.join(room for _, room in rooms[1:])}</div>"


def _draw_room(
    view: View,
    names: tuple[str, str],
    curves: tuple[Curve, Curve],
    room: _Room | None,
    left: _Left,
    *,
    columns: int,
) -> _Figure:
    """Return the frame and the figure of free memory and its peaks.

    `room` is what is free now and of how much, `left` the time until none is, and its lower bound.
    """
    called, name = names
    now = 0.0 if view.snapshot is None else view.snapshot.time_seconds
    forecast = None
    if left[0] is not None and room is not None:
        forecast = Forecast(begin=now, value=room[0], seconds=left[0], earliest_seconds=left[1])
    begin = curves[0][0][0]
    if forecast is not None:
        begin = min(begin, now - HOUR_SECONDS)
    past, peaks = (svg.thin_curve(curve, columns, begin=begin) for curve in curves)
    if past and room is not None:
        past[-1].append((now, room[0]))
    known = [value for stretch in past for _, value in stretch]
    top = svg.find_top(known, most=None if room is None else room[1])
    end = now if forecast is None else now + MARGIN * max(forecast.seconds, 1.0)
    frame = Frame(begin=begin, end=end, top=top, now=None if forecast is None else now)
    alarms = [event for event in view.history.events if event.level is Level.ALARM]
    shapes = [
        svg.draw_curve(frame, past),
        svg.draw_line(frame, peaks, kind="peak"),
        *(  # alarms of this GPU or of none: a text begins with its subject
            svg.draw_mark(frame, event.seconds)
            for event in alarms
            if not event.text.startswith("GPU ") or event.text.startswith(f"{called} ")
        ),
        "" if forecast is None else svg.draw_forecast(frame, forecast) + svg.draw_mark(frame, now),
        svg.draw_zero(frame),
    ]
    title = (
        f"{called}: free memory from {_format_clock(begin)} to {_format_clock(end)}, down to zero"
    )
    text = (
        "memory not known now"
        if room is None
        else f"{format_size(room[0])} of {format_size(room[1])} free"
    )
    return frame, (
        f"<figure><figcaption><b>{escape_text(called)}</b> {escape_text(name)}: {text}</figcaption>"
        f"<i>{format_size(frame.top)}</i>{svg.draw_picture(frame, shapes, title=title)}"
        f"{_draw_axis(frame, now, forecast)}</figure>"
    )


def _draw_axis(frame: Frame, now: float, forecast: Forecast | None) -> str:
    words = [f"{format_duration(now - frame.begin)} before", f"now, {_format_clock(now)}"]
    if forecast is not None:
        words.append(
            f"out of memory {_format_clock(now + forecast.seconds)}, in {format_duration(forecast.seconds)}"
        )
    elif frame.now is not None:
        words.append("")
    kind = "axis" if frame.now is None else '"axis ahead"'
    return (
        f"<div class={kind}>{''.join(f'<span>{escape_text(word)}</span>' for word in words)}</div>"
    )


def _draw_load(running: Curve, columns: int, now: float, above: Frame | None) -> str:
    begin, end, bend = (
        (running[0][0], now, None) if above is None else (above.begin, above.end, above.now)
    )
    stretches = svg.thin_curve(running, columns, begin=begin)
    top = max((value for stretch in stretches for _, value in stretch), default=1.0)
    frame = Frame(begin=begin, end=end, top=MARGIN * top or 1.0, height=40.0, now=bend)
    title = (
        f"Running requests, from {_format_clock(begin)} to {_format_clock(now)}, at most {top:.0f}"
    )
    return (
        f"<figure class=strip><figcaption><b>Load</b>: running requests, at most {top:.0f}</figcaption>"
        f"{svg.draw_picture(frame, [svg.draw_curve(frame, stretches)], title=title)}"
        f"{_draw_axis(frame, now, None)}</figure>"
    )


def _format_clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%MZ")
