"""Draw curves of free memory and load over the last day or week."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.expose import drawing as svg
from vllm_headroom.expose.drawing import MARGIN, Curve, Forecast, Frame, escape_text
from vllm_headroom.expose.times import render_time
from vllm_headroom.expose.view import View
from vllm_headroom.model import GpuReading, HostMemory, Snapshot, find_part
from vllm_headroom.units import (
    DAY_SECONDS,
    GIB,
    HOUR_SECONDS,
    MIB,
    format_duration,
    format_instant,
    format_size,
    to_datetime,
)
from vllm_headroom.vocabulary import Level, Situation

MOST_COLUMNS: Final = 480
"""The total number of columns in all curves. A column has two points of 10 characters each. All
columns take 10 kB, and the page stays below 90 kB.
"""

EDGE_PERCENT: Final = 4
"""A tick this close to an edge has no label (our choice). The label of such a tick would not fit
into the plot.
"""

LEAST_COLUMNS: Final = 32
"""The minimum number of columns per curve (our choice). With fewer, the course of a day would not
be visible.
"""

MOST_DRAWN_GPUS: Final = 16
"""The maximum number of GPUs with a figure (our choice). Other GPUs have only verdicts and table
rows.
"""

LEGEND: Final = (
    ("line", "free", "free memory"),
    ("peak", "low", "at the peaks of use"),
    ("zero", "end", "nothing free"),
    ("ahead", "to", "forecast until nothing is free"),
    ("edge", "area", "from the earliest time on"),
    ("mark", "at", "an alarm"),
    ("now", "now", "now"),
)
"""Each kind of shape: its class, the class of its legend sample, and its meaning."""

MOST_CLOCK_SECONDS: Final = 4 * DAY_SECONDS
"""If a figure covers more time than this, its ticks are whole days (see TICK_SECONDS). Whole-day
ticks are labelled with the day, not with the time of day.
"""

PAST_FACTOR: Final = 3
"""The maximum length of the shown past, in lengths of the forecast (our choice). With this maximum,
the forecast takes up at least a quarter of the figure's width.
"""

FUTURE_FACTOR: Final = 2
"""The maximum length of a forecast's visible part, in lengths of the shown past. This is our
choice.
"""


RANGES: Final = {
    "1h": HOUR_SECONDS,
    "6h": 6 * HOUR_SECONDS,
    "24h": DAY_SECONDS,
    "7d": 7 * DAY_SECONDS,
}
"""The time ranges that a reader can select, by name. The history covers a week."""


class _Room(Struct, frozen=True, kw_only=True):
    """The free memory of a GPU or of the host over time, and its forecast."""

    subject: str
    """The name of the GPU or host in verdicts."""
    name: str
    """The model of a GPU; empty for the host."""
    rank: int
    """The position of the GPU's or host's verdict among all verdicts; 0 is the worst."""
    free_curve: Curve
    """The curve of free memory, which is never empty."""
    peak_curve: Curve
    """The free memory at usage peaks; empty if unknown, as for the host."""
    free_bytes: int | None
    """The free memory now, or None if unknown."""
    total_bytes: int
    """The total memory; 0 if unknown."""
    left_seconds: float | None
    """The time until no memory is free, or None if no growth is found."""
    earliest_seconds: float | None
    """The lower bound of `left_seconds`, or None if unknown."""


class _Figure(Struct, frozen=True, kw_only=True):
    """A figure as HTML, and the frame of its picture."""

    frame: Frame
    html: str


def draw_figures(
    view: View, snapshot: Snapshot, past_seconds: float | None = None
) -> Iterator[str]:
    """Yield up to three pieces of HTML: worst figure, load, and other figures.

    There is a figure for the host and for each of the engine's GPUs. Figures with an empty curve
    are omitted. The figure with the worst verdict is large and has the legend. The figure of the
    load has the same time axis. The figure of the load is omitted if the load's curve has fewer
    than two points. Nothing is yielded if there are no curves. `past_seconds` is the length of the
    past to show. If `past_seconds` is None, the length suits the curve and its forecast.
    """
    now = snapshot.time_seconds
    columns = _count_columns(view, snapshot)
    rooms = sorted(_list_rooms(view, snapshot, past_seconds), key=lambda room: room.rank)
    figures = [_draw_room(view, room, now, past_seconds, columns) for room in rooms]
    if figures:
        yield f"{figures[0].html}{_render_legend(figures[0].html)}"
    running_curve = view.history.read_curve("running", past_seconds)
    if len(running_curve[0]) > 1:
        above = figures[0].frame if figures else None
        running_now = sum_running(view)
        yield _draw_load(running_curve, columns, now, running_now, above)
    if len(figures) > 1:
        small_figures = "".join(figure.html for figure in figures[1:])
        yield f"<div class=rooms>{small_figures}</div>"


def _render_legend(figure: str) -> str:
    """Return the legend, which explains each kind of shape in a figure."""
    entries = "".join(
        f"<span><i class={sample}></i>{meaning}</span>"
        for kind, sample, meaning in LEGEND
        if f'class="{kind}"' in figure
    )
    return f"<p class=key>{entries}<span class=zone>Times are in UTC.</span></p>"


def _count_columns(view: View, snapshot: Snapshot) -> int:
    """Return the number of columns to which each curve is thinned."""
    curves = 2 * len(snapshot.owned_gpus[:MOST_DRAWN_GPUS])
    if view.history.read_curve("host")[0]:
        curves += 1
    return max(LEAST_COLUMNS, MOST_COLUMNS // max(1, curves))


def _list_rooms(view: View, snapshot: Snapshot, past_seconds: float | None) -> Iterator[_Room]:
    """Yield the free memory of the engine's GPUs and of the host.

    Entries without a curve are omitted.
    """
    ranks = {verdict.subject: rank for rank, verdict in enumerate(view.verdicts)}
    for gpu in snapshot.owned_gpus[:MOST_DRAWN_GPUS]:
        free_curve = view.history.read_curve(f"free {gpu.reading.uuid}", past_seconds)
        if free_curve[0]:
            peak_curve = view.history.read_curve(f"peak {gpu.reading.uuid}", past_seconds)
            rank = ranks.get(gpu.reading.display_name, len(ranks))
            yield _build_gpu_room(view, gpu.reading, rank, free_curve, peak_curve)
    host_curve = view.history.read_curve("host", past_seconds)
    if host_curve[0]:
        # The host's figure comes first if its verdict is the worst, and last otherwise.
        rank = 0 if ranks.get("host memory") == 0 else len(ranks)
        yield _build_host_room(view, snapshot.host, rank, host_curve)


def _build_gpu_room(
    view: View, gpu: GpuReading, rank: int, free_curve: Curve, peak_curve: Curve
) -> _Room:
    """Return the free memory of a GPU, with a forecast if memory use is growing."""
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
        peak_curve=peak_curve,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        left_seconds=view.values.value(catalog.TIME_TO_OOM, *labels),
        earliest_seconds=view.values.value(catalog.TIME_TO_OOM_LOWER, *labels),
    )


def _build_host_room(view: View, host: HostMemory | None, rank: int, free_curve: Curve) -> _Room:
    """Return the free memory of the host.

    A forecast is included if memory use grows without bound.
    """
    free_bytes = None
    total_bytes = 0
    if host is not None:
        free_bytes = host.room_bytes
        total_bytes = host.limit_bytes or 0
    situations = {
        verdict.situation for verdict in view.verdicts if verdict.subject == "host memory"
    }
    left_seconds = None
    earliest_seconds = None
    # Growth that fills a configured pool stops at the pool's size. A line to zero would be wrong.
    if situations != {Situation.FILLING}:
        left_seconds = view.values.value(catalog.HOST_TIME_TO_OOM)
        earliest_seconds = view.values.value(catalog.HOST_TIME_TO_OOM_LOWER)
    return _Room(
        subject="Host memory",
        name="",
        rank=rank,
        free_curve=free_curve,
        peak_curve=((), ()),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        left_seconds=left_seconds,
        earliest_seconds=earliest_seconds,
    )


def _draw_room(
    view: View, room: _Room, now: float, past_seconds: float | None, columns: int
) -> _Figure:
    """Return the figure of a room's free memory, with the forecast if known."""
    begin = room.free_curve[0][0] if past_seconds is None else now - past_seconds
    end = now
    forecast = None
    if room.left_seconds is not None and room.free_bytes is not None:
        forecast = Forecast(
            begin=now,
            value=room.free_bytes,
            seconds=room.left_seconds,
            earliest_seconds=room.earliest_seconds,
        )
        if past_seconds is None:
            past_seconds = _choose_past(now - begin, forecast.seconds)
        begin = now - past_seconds
        # A longer forecast extends beyond the right edge of the picture.
        end = now + min(MARGIN * max(forecast.seconds, 1.0), FUTURE_FACTOR * past_seconds)
    past = svg.thin_curve(room.free_curve, columns, begin=begin)
    peaks = svg.thin_curve(room.peak_curve, columns, begin=begin)
    if past and room.free_bytes is not None:
        # The curve has one point per minute. The point added here connects the curve to the current
        # value.
        past[-1].append((now, room.free_bytes))
    usual_top = svg.find_top(
        (value for stretch in past for _, value in stretch),
        limit=None if room.free_bytes is None else room.total_bytes,
    )
    # The top is at least the current free memory. Free memory rises when the engine falls asleep.
    top = max(usual_top, room.free_bytes or 0, 1)
    # Small amounts of memory are easier to read in MiB.
    unit = GIB if top >= GIB else MIB
    frame = Frame(begin=begin, end=end, top=svg.round_top(top, unit))
    ticks = svg.list_ticks(begin, end)
    shapes = [
        # The order matters, because later shapes cover earlier ones.
        svg.draw_grid(frame, ticks),
        svg.draw_curve(frame, past),
        svg.draw_line(frame, peaks, kind="peak"),
    ]
    shapes += [svg.draw_mark(frame, seconds) for seconds in _list_alarm_times(view, room)]
    if forecast is not None:
        shapes.append(svg.draw_forecast(frame, forecast))
        shapes.append(svg.draw_mark(frame, now, kind="now"))
    shapes.append(svg.draw_zero(frame))
    span = f"from {format_instant(begin)} to {format_instant(end)}"
    title = f"{room.subject}: free memory {span}"
    caption = "memory not known now"
    if room.free_bytes is not None:
        total = format_size(room.total_bytes)
        caption = f"{format_size(room.free_bytes)} of {total} free"
    highest = max((value for stretch in past for _, value in stretch), default=0)
    # The picture does not show values above its top, so the caption mentions them.
    if highest > frame.top:
        caption += f"; up to {format_size(highest)} earlier, above the picture"
    if len(past) > 1:
        caption += "; gaps: not read"
    subject = escape_text(room.subject)
    name = escape_text(f" {room.name}" if room.name else "")
    picture = svg.draw_picture(frame, shapes, title=title)
    plot = _render_plot(frame, picture, title, ticks, is_in_bytes=True)
    html = (
        f"<figure><figcaption><b>{subject}</b>{name}: {svg.render_text(caption)}</figcaption>{plot}"
        f"{_render_end(now, forecast, end)}</figure>"
    )
    return _Figure(frame=frame, html=html)


def _choose_past(known_seconds: float, left_seconds: float) -> float:
    """Return how much of the past to show next to a forecast of `left_seconds`.

    `known_seconds` is how much of the past is known. Past and future have the same scale. A short
    forecast therefore truncates a long past.
    """
    forecast_seconds = MARGIN * max(left_seconds, 1.0)
    # At least an hour is shown, because the curve has only one point per minute.
    most_past_seconds = max(HOUR_SECONDS, PAST_FACTOR * forecast_seconds)
    return min(max(known_seconds, HOUR_SECONDS), most_past_seconds)


def _list_alarm_times(view: View, room: _Room) -> Iterator[float]:
    """Yield the times of all alarms, except alarms about other GPUs."""
    for event in view.history.events:
        is_of_this_gpu = event.text.startswith(f"{room.subject} ")
        is_of_no_gpu = not event.text.startswith("GPU ")
        if event.level is Level.ALARM and (is_of_this_gpu or is_of_no_gpu):
            yield event.seconds


def _render_plot(
    frame: Frame, picture: str, title: str, ticks: list[float], *, is_in_bytes: bool
) -> str:
    """Return a picture with labels on its axes; `ticks` are the times to label.

    The page's script reads the curve's values from the SVG `<path>` element. The script reads the
    scale from the `data-` attributes.
    """
    if is_in_bytes:
        unit = "B"
        quarters = range(svg.GRID_PARTS, -1, -1)
        value_texts = [_format_level(frame.top, quarter) for quarter in quarters]
    else:
        unit = ""
        value_texts = [f"{frame.top:.0f}", "0"]
    labels = "".join(f"<span>{text}</span>" for text in value_texts)
    tick_texts = "".join(_render_tick(frame, seconds) for seconds in ticks)
    return (
        f"<div class=plot><div class=values aria-hidden=true>{labels}</div>"
        f'<div class=reading role=group tabindex=0 aria-label="{escape_text(title)}; '
        f'the arrow keys read its values" data-begin="{frame.begin:.0f}" '
        f'data-end="{frame.end:.0f}" data-top="{frame.top:.0f}" data-unit="{unit}">{picture}</div>'
        f"<svg class=ticks aria-hidden=true>{tick_texts}</svg></div>"
    )


def _format_level(top_bytes: float, quarter: int) -> str:
    """Return the amount of memory at a grid line.

    `quarter` counts the lines from the bottom.
    """
    unit_bytes = GIB if top_bytes >= GIB else MIB
    unit_name = "GiB" if top_bytes >= GIB else "MiB"
    return f"{top_bytes * quarter / svg.GRID_PARTS / unit_bytes:.3g} {unit_name}"


def _render_tick(frame: Frame, seconds: float) -> str:
    """Return a tick's label, or "" if it would extend beyond the plot."""
    # The position is a percentage of the width. The labels are outside the stretched picture.
    percent = 100 * frame.x(seconds) / frame.width
    if not EDGE_PERCENT <= percent <= 100 - EDGE_PERCENT:
        return ""
    text = _format_tick(seconds)
    # Midnight UTC may not be midnight in the reader's time zone. With this attribute, the script
    # shows the day anyway.
    is_of_days = frame.end - frame.begin > MOST_CLOCK_SECONDS
    day = " data-day" if is_of_days else ""
    return (
        f'<text x="{percent:.1f}%" y="14" text-anchor="middle" '
        f'data-time="{seconds:.0f}"{day}>{text}</text>'
    )


def _format_tick(seconds: float) -> str:
    """Return the time of day, or the date at midnight."""
    is_midnight = seconds % DAY_SECONDS == 0
    return to_datetime(seconds).strftime("%d %b" if is_midnight else "%H:%M")


def _render_end(now: float, forecast: Forecast | None, end: float) -> str:
    """Return the earliest and likely times when memory is full, or "" if unknown."""
    if forecast is None:
        return ""
    likely_seconds = now + forecast.seconds
    left = svg.render_text(format_duration(forecast.seconds))
    likely = f"{render_time(likely_seconds)} (in {left})"
    if forecast.earliest_seconds is None:
        when = f"about {likely}"
    else:
        earliest = render_time(now + forecast.earliest_seconds)
        when = f"between {earliest}, at the earliest, and {likely}, likely"
    beyond = "; beyond this picture" if likely_seconds > end else ""
    return f"<p class=dim>Nothing free {when}{beyond}.</p>"


def sum_running(view: View) -> float | None:
    """Return the current number of running requests in all engines, or None if unknown."""
    running = view.values.find_all(catalog.ENGINE_RUNNING).values()
    return sum(running) if running else None


def _draw_load(
    running_curve: Curve,
    columns: int,
    now: float,
    running_now: float | None,
    above: Frame | None,
) -> str:
    """Return the figure of running requests.

    If `above` is given, the figure has its time axis.
    """
    begin = running_curve[0][0]
    end = now
    if above is not None:
        begin = above.begin
        end = above.end
    stretches = svg.thin_curve(running_curve, columns, begin=begin)
    if stretches and running_now is not None:
        # As in the memory figures, the last point is the current value.
        stretches[-1].append((now, running_now))
    most_running = max((value for stretch in stretches for _, value in stretch), default=1.0)
    # The frame needs a height, so the top is never 0, even when idle.
    top = svg.round_top(MARGIN * most_running or 1.0, 1.0)
    frame = Frame(begin=begin, end=end, top=top, height=40.0)
    span = f"from {format_instant(begin)} to {format_instant(now)}"
    title = f"Running requests, {span}, at most {most_running:.0f}"
    picture = svg.draw_picture(frame, [svg.draw_curve(frame, stretches)], title=title)
    plot = _render_plot(frame, picture, title, svg.list_ticks(begin, end), is_in_bytes=False)
    now_text = "" if running_now is None else f", {running_now:.0f} now"
    caption = f"<b>Load</b>: running requests{now_text}, {most_running:.0f} at the highest"
    return f"<figure class=strip><figcaption>{caption}</figcaption>{plot}</figure>"
