"""A post-mortem as a self-contained HTML file."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from vllm_headroom.expose import drawing
from vllm_headroom.expose.assets import PAGE_STYLE
from vllm_headroom.expose.drawing import Frame, Point, escape_text
from vllm_headroom.model import Diagnosis, GpuAtEnd
from vllm_headroom.trace.incident import MOST_SHOWN_ENTRIES
from vllm_headroom.units import format_instant, format_size
from vllm_headroom.vocabulary import Level, Sureness
from vllm_headroom_tools.postmortem.advice import TODO
from vllm_headroom_tools.postmortem.report import Line, Postmortem, list_sections

CURVE_COLUMNS: Final = 480
"""Our choice: the number of points in a curve. It is one per two pixels of a wide window."""

OUR_LINKS: Final = re.compile(
    "|".join({re.escape(link) for steps in TODO.values() for _, link in steps if link})
)
"""Matches the links in our own advice. Only these become links; text from a file never does."""

FINDING_LEVELS: Final = {
    Sureness.SURE: Level.ALARM,
    Sureness.LIKELY: Level.WARNING,
    Sureness.POSSIBLE: Level.UNKNOWN,
}
"""The level for a finding's colour, keyed by how certain the finding is."""


def render_postmortem(postmortem: Postmortem) -> str:
    """Return the complete HTML page."""
    title = f"Post-mortem: {postmortem.answer.sentence}"
    when = "" if postmortem.ending is None else format_instant(postmortem.ending.seconds)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape_text(title)}</title><style>{PAGE_STYLE}</style></head><body>"
        "<header><h1>Post-mortem</h1>"
        f"<p class=dim>{when} {escape_text(postmortem.file)}</p></header><main>"
        f"{''.join(_build_body(postmortem))}</main></body></html>\n"
    )


def _build_body(postmortem: Postmortem) -> Iterator[str]:
    """Yield the HTML of the page: findings, curves and the report's sections."""
    yield "<ul class=verdicts>"
    for diagnosis in postmortem.findings:
        yield _render_finding(diagnosis)
    yield "</ul>"
    yield from _draw_figures(postmortem)
    for title, lines in list_sections(postmortem, MOST_SHOWN_ENTRIES):
        yield _render_section(title, lines)


def _render_finding(diagnosis: Diagnosis) -> str:
    evidence = "".join(f"<li>{escape_text(sentence)}</li>" for sentence in diagnosis.evidence)
    return (
        f"<li class={FINDING_LEVELS[diagnosis.sureness]}><b>{diagnosis.sureness.upper()}</b> "
        f"{escape_text(diagnosis.sentence)}<ul>{evidence}</ul></li>"
    )


def _render_section(title: str, lines: list[Line]) -> str:
    """Return a section as HTML with our links.

    Returns an empty string if there are no lines.
    """
    if not lines:
        return ""
    items = "".join(
        f"<li><b>{escape_text(name)}</b> {escape_text(text)}</li>" for name, text in lines
    )
    linked_items = OUR_LINKS.sub(r'<a href="\g<0>">\g<0></a>', items)
    return f"<h2>{escape_text(title)}</h2><ul>{linked_items}</ul>"


def _draw_figures(postmortem: Postmortem) -> Iterator[str]:
    """Yield diagrams of the load and of each GPU's free memory.

    A GPU has two diagrams: the whole trace and the last minutes. The last minutes are known only
    for the GPUs of a run that has ended.
    """
    ending = postmortem.ending
    end_seconds = None
    gpus = {}
    if ending is not None:
        end_seconds = ending.seconds
        gpus = {gpu.uuid: gpu for gpu in ending.gpus}
    curves = postmortem.curves
    for uuid in curves.uuids:
        gpu = gpus.get(uuid)
        name = f"Free memory of {uuid if gpu is None else gpu.display_name}"
        yield _draw_memory(f"{name}, on a scale from 0", curves.of("free", uuid), end_seconds)
        if gpu is not None:
            title = f"{name} in the last minutes, second by second"
            used = postmortem.incident.before.used.get(uuid, ())
            yield _draw_memory(title, _list_free(gpu, used), end_seconds)
    yield _draw_requests("Running requests", curves.of("running"), end_seconds)


def _list_free(gpu: GpuAtEnd, used: Iterable[tuple[float, int]]) -> list[Point]:
    """Return a GPU's free bytes over time, computed from its used bytes.

    Returns an empty list if the size of the GPU is unknown.
    """
    usable_bytes = gpu.usable_bytes
    if usable_bytes is None:
        return []
    return [(seconds, usable_bytes - used_bytes) for seconds, used_bytes in used]


def _draw_memory(title: str, points: list[Point], end_seconds: float | None) -> str:
    """Return a figure of memory on a scale from 0.

    Returns an empty string if no value is known. The scale ends at the highest value before the
    exit. After the exit, all memory is free. Including that value would make the earlier curve look
    flat.
    """
    sizes = []
    for seconds, n_bytes in points:
        is_before_end = end_seconds is None or seconds <= end_seconds
        if n_bytes is not None and is_before_end:
            sizes.append(n_bytes)
    if not sizes:
        return ""
    frame = _build_frame(points, drawing.find_top(sizes))
    shapes = (*_draw_shapes(frame, points, end_seconds), drawing.draw_zero(frame))
    return _render_figure(title, frame, format_size(frame.top), shapes)


def _draw_requests(title: str, points: list[Point], end_seconds: float | None) -> str:
    """Return a figure of requests, or an empty string if no value is known."""
    counts = [count for _, count in points if count is not None]
    if not counts:
        return ""
    frame = _build_frame(points, max(counts))
    shapes = _draw_shapes(frame, points, end_seconds)
    return _render_figure(title, frame, f"{frame.top:.0f}", shapes)


def _build_frame(points: list[Point], top: float) -> Frame:
    times = [seconds for seconds, _ in points]
    return Frame(begin=min(times), end=max(times), top=top)


def _draw_shapes(frame: Frame, points: list[Point], end_seconds: float | None) -> tuple[str, ...]:
    """Return the shapes of the curve, and a mark at the exit.

    Without an exit, there is no mark.
    """
    stretches = drawing.thin_curve(drawing.build_curve(points), CURVE_COLUMNS)
    curve = drawing.draw_curve(frame, stretches)
    return (curve,) if end_seconds is None else (curve, drawing.draw_mark(frame, end_seconds))


def _render_figure(title: str, frame: Frame, top: str, shapes: tuple[str, ...]) -> str:
    """Return a figure with its title, its highest value and its times."""
    begin = format_instant(frame.begin)
    end = format_instant(frame.end)
    return (
        f"<figure><figcaption>{escape_text(title)}; the upright line is the end</figcaption>"
        f"<i>{top}</i>{drawing.draw_picture(frame, shapes, title=title)}"
        f"<div class=axis><span>{begin}</span><span>{end}</span></div></figure>"
    )
