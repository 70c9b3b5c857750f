"""Draw the free memory of GPUs and host, and the load, over the last day."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.expose import drawing as svg
from vllm_headroom.expose.drawing import MARGIN, Curve, Forecast, Frame, escape_text
from vllm_headroom.expose.view import View
from vllm_headroom.model import GpuReading, HostMemory, Snapshot, find_part
from vllm_headroom.units import HOUR_SECONDS, format_duration, format_size, to_datetime
from vllm_headroom.vocabulary import Level

MOST_COLUMNS: Final = 480
"""The columns of all curves together. A column has two points of 10 characters each: together they
take 10 kB, and the page stays below 60 kB."""

LEAST_COLUMNS: Final = 32
"""Our choice: the fewest columns of one curve. With fewer, the course of a day is not visible."""

MOST_DRAWN_GPUS: Final = 16
"""Our choice: how many GPUs have a figure; further GPUs have only verdicts and rows in tables."""

LEGEND: Final = (
    "<span><i class=free></i>free memory</span>"
    "<span><i class=low></i>its lowest value per minute</span>"
    "<span><i class=to></i>forecast until memory is full, with the earliest time</span>"
    "<span><i class=at></i>an alarm, or now</span>"
)


class _Room(Struct, frozen=True, kw_only=True):
    """The free memory of a GPU or of the host over the last day, and its forecast."""

    subject: str
    """The name that verdicts have for it."""
    name: str
    """The model of a GPU; empty for the host."""
    rank: int
    """The place of its verdict among all verdicts: 0 is the worst."""
    free_curve: Curve
    """Never empty."""
    peak_curve: Curve
    """The free memory at the peaks of use; empty where unknown, as for the host."""
    free_bytes: int | None
    """The free memory now; None where unknown."""
    total_bytes: int
    """0 where unknown."""
    left_seconds: float | None
    """The time until nothing is free; None where no growth is found."""
    earliest_seconds: float | None
    """The lower bound of `left_seconds`; None where unknown."""


class _Figure(Struct, frozen=True, kw_only=True):
    """A figure as HTML, and the frame of its picture."""

    frame: Frame
    html: str


def draw_figures(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield at most three pieces of HTML: the worst figure, the load, and all other figures.

    There is a figure of each GPU of the engine and of the host that has a curve. The figure with
    the worst verdict is large and has the legend. The load has the same axis of time; it is left
    out with fewer than two points. Nothing is yielded without a curve.
    """
    now = snapshot.time_seconds
    columns = _count_columns(view, snapshot)
    rooms = sorted(_list_rooms(view, snapshot), key=lambda room: room.rank)
    figures = [_draw_room(view, room, now, columns) for room in rooms]
    if figures:
        yield f"{figures[0].html}<p class=key>{LEGEND}</p>"
    running_curve = view.history.read_curve("running")
    if len(running_curve[0]) > 1:
        yield _draw_load(running_curve, columns, now, figures[0].frame if figures else None)
    if len(figures) > 1:
        small_figures = "".join(figure.html for figure in figures[1:])
        yield f"<div class=rooms>{small_figures}</div>"


def _count_columns(view: View, snapshot: Snapshot) -> int:
    """Return the number of columns to which each curve is thinned."""
    curves = 2 * len(snapshot.owned_gpus[:MOST_DRAWN_GPUS])
    if view.history.read_curve("host")[0]:
        curves += 1
    return max(LEAST_COLUMNS, MOST_COLUMNS // max(1, curves))


def _list_rooms(view: View, snapshot: Snapshot) -> Iterator[_Room]:
    """Yield the free memory of each GPU of the engine and of the host, if it has a curve."""
    ranks = {verdict.subject: rank for rank, verdict in enumerate(view.verdicts)}
    for gpu in snapshot.owned_gpus[:MOST_DRAWN_GPUS]:
        free_curve = view.history.read_curve(f"free {gpu.reading.uuid}")
        if free_curve[0]:
            rank = ranks.get(gpu.reading.display_name, len(ranks))
            yield _build_gpu_room(view, gpu.reading, rank, free_curve)
    host_curve = view.history.read_curve("host")
    if host_curve[0]:
        # The host's figure is first where its verdict is the worst, and last otherwise.
        rank = 0 if ranks.get("host memory") == 0 else len(ranks)
        yield _build_host_room(view, snapshot.host, rank, host_curve)


def _build_gpu_room(view: View, gpu: GpuReading, rank: int, free_curve: Curve) -> _Room:
    """Return the free memory of a GPU, with its forecast where memory grows."""
    free_bytes = None
    total_bytes = 0
    if gpu.memory is not None:
        free_bytes = gpu.memory.free_bytes
        total_bytes = gpu.memory.total_bytes
    labels = (str(gpu.index), gpu.uuid)
    return _Room(
        subject=gpu.display_name,
        name=gpu.name.removesuffix(find_part(gpu.uuid)).rstrip(),
        rank=rank,
        free_curve=free_curve,
        peak_curve=view.history.read_curve(f"peak {gpu.uuid}"),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        left_seconds=view.values.value(catalog.TIME_TO_OOM, *labels),
        earliest_seconds=view.values.value(catalog.TIME_TO_OOM_LOWER, *labels),
    )


def _build_host_room(view: View, host: HostMemory | None, rank: int, free_curve: Curve) -> _Room:
    """Return the free memory of the host, with its forecast where memory grows."""
    free_bytes = None
    total_bytes = 0
    if host is not None:
        free_bytes = host.room_bytes
        total_bytes = host.limit_bytes or 0
    return _Room(
        subject="Host memory",
        name="",
        rank=rank,
        free_curve=free_curve,
        peak_curve=((), ()),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        left_seconds=view.values.value(catalog.HOST_TIME_TO_OOM),
        earliest_seconds=view.values.value(catalog.HOST_TIME_TO_OOM_LOWER),
    )


def _draw_room(view: View, room: _Room, now: float, columns: int) -> _Figure:
    """Return the figure of free memory and its peaks, with the forecast where known."""
    begin = room.free_curve[0][0]
    end = now
    forecast = None
    if room.left_seconds is not None and room.free_bytes is not None:
        forecast = Forecast(
            begin=now,
            value=room.free_bytes,
            seconds=room.left_seconds,
            earliest_seconds=room.earliest_seconds,
        )
        # At least the last hour: a short past would be stretched to two thirds of the width.
        begin = min(begin, now - HOUR_SECONDS)
        end = now + MARGIN * max(forecast.seconds, 1.0)
    past = svg.thin_curve(room.free_curve, columns, begin=begin)
    peaks = svg.thin_curve(room.peak_curve, columns, begin=begin)
    if past and room.free_bytes is not None:
        past[-1].append((now, room.free_bytes))
    frame = Frame(
        begin=begin,
        end=end,
        top=svg.find_top(
            (value for stretch in past for _, value in stretch),
            limit=None if room.free_bytes is None else room.total_bytes,
        ),
        now=None if forecast is None else now,
    )
    shapes = [svg.draw_curve(frame, past), svg.draw_line(frame, peaks, kind="peak")]
    shapes += [svg.draw_mark(frame, seconds) for seconds in _list_alarm_times(view, room)]
    if forecast is not None:
        shapes.append(svg.draw_forecast(frame, forecast))
        shapes.append(svg.draw_mark(frame, now))
    shapes.append(svg.draw_zero(frame))
    span = f"from {_format_clock(begin)} to {_format_clock(end)}"
    title = f"{room.subject}: free memory {span}"
    caption = "memory not known now"
    if room.free_bytes is not None:
        total = format_size(room.total_bytes)
        caption = f"{format_size(room.free_bytes)} of {total} free"
    subject = escape_text(room.subject)
    name = escape_text(room.name)
    picture = svg.draw_picture(frame, shapes, title=title)
    axis = _draw_axis(frame, now, forecast)
    html = (
        f"<figure><figcaption><b>{subject}</b> {name}: {caption}</figcaption>"
        f"<i>{format_size(frame.top)}</i>{picture}{axis}</figure>"
    )
    return _Figure(frame=frame, html=html)


def _list_alarm_times(view: View, room: _Room) -> Iterator[float]:
    """Yield the times of all alarms but those of other GPUs; an event begins with its subject."""
    for event in view.history.events:
        is_of_this_gpu = event.text.startswith(f"{room.subject} ")
        is_of_no_gpu = not event.text.startswith("GPU ")
        if event.level is Level.ALARM and (is_of_this_gpu or is_of_no_gpu):
            yield event.seconds


def _draw_axis(frame: Frame, now: float, forecast: Forecast | None) -> str:
    """Return the texts below a figure: its begin, the time now and, with a forecast, its end."""
    past = format_duration(now - frame.begin)
    texts = [f"{past} before", f"now, {_format_clock(now)}"]
    if forecast is not None:
        end = _format_clock(now + forecast.seconds)
        texts.append(f"out of memory {end}, in {format_duration(forecast.seconds)}")
    elif frame.now is not None:
        # The load has no forecast, but the same axis as the figure above it, which has one.
        texts.append("")
    kind = "axis" if frame.now is None else '"axis ahead"'
    spans = "".join(f"<span>{escape_text(text)}</span>" for text in texts)
    return f"<div class={kind}>{spans}</div>"


def _draw_load(running_curve: Curve, columns: int, now: float, above: Frame | None) -> str:
    """Return the figure of running requests, on the same axis of time as `above`, if any."""
    begin = running_curve[0][0]
    end = now
    scale_change = None
    if above is not None:
        begin = above.begin
        end = above.end
        scale_change = above.now
    stretches = svg.thin_curve(running_curve, columns, begin=begin)
    most_running = max((value for stretch in stretches for _, value in stretch), default=1.0)
    top = MARGIN * most_running or 1.0
    frame = Frame(begin=begin, end=end, top=top, height=40.0, now=scale_change)
    span = f"from {_format_clock(begin)} to {_format_clock(now)}"
    title = f"Running requests, {span}, at most {most_running:.0f}"
    picture = svg.draw_picture(frame, [svg.draw_curve(frame, stretches)], title=title)
    axis = _draw_axis(frame, now, None)
    caption = f"<b>Load</b>: running requests, at most {most_running:.0f}"
    return f"<figure class=strip><figcaption>{caption}</figcaption>{picture}{axis}</figure>"


def _format_clock(seconds: float) -> str:
    return to_datetime(seconds).strftime("%H:%MZ")
