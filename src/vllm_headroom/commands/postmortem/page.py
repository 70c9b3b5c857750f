"""A post-mortem as one file of HTML, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from vllm_headroom.commands.postmortem.finding import TODO, Sureness
from vllm_headroom.commands.postmortem.known import header_used, log_lines, sentences
from vllm_headroom.commands.postmortem.report import Postmortem, numbers
from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import Frame, Point
from vllm_headroom.expose.page.style import PAGE_STYLE
from vllm_headroom.units import instant, size
from vllm_headroom.vocabulary import CONTROLS, Level

COLUMNS: Final = 480
MARGIN: Final = 1.05
LEVELS: Final = {Sureness.SURE: Level.ALARM, Sureness.LIKELY: Level.WARNING, Sureness.POSSIBLE: Level.UNKNOWN}


def page(report: Postmortem) -> str:
    """Return the page."""
    title = f"Post-mortem: {report.answer.sentence}"
    when = "" if report.facts is None else instant(report.facts.seconds)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_safe(title)}</title><style>{PAGE_STYLE}</style></head><body>"
        f"<header><h1>Post-mortem</h1><p class=dim>{when} {_safe(report.file)}</p></header><main>"
        f"{''.join(_body(report))}</main></body></html>\n"
    )


def _body(report: Postmortem) -> Iterator[str]:
    yield "<ul class=verdicts>"
    for finding in report.findings:
        yield (
            f"<li class={LEVELS[finding.sureness]}><b>{finding.sureness.upper()}</b> {_safe(finding.sentence)}"
            f"<ul>{''.join(f'<li>{_safe(each)}</li>' for each in finding.evidence)}</ul></li>"
        )
    yield "</ul>"
    yield from _figures(report)
    yield _list("The sidecar said then", [_safe(each) for each in sentences(report.known)])
    yield _list("Timeline", [f"{instant(seconds)} {_safe(what)}" for seconds, what in report.timeline])
    if report.facts is not None:
        yield _list(
            "Numbers for a bug report", [f"{_safe(n)}: {_safe(v)}" for n, v in numbers(report.facts, report.known)]
        )
    yield _list("What to do", [_step(what, link) for what, link in TODO[report.answer.cause]])
    yield _list("The sidecar's log", [_safe(each) for each in log_lines(report.known)])


def _figures(report: Postmortem) -> Iterator[str]:
    at = None if report.facts is None else report.facts.seconds
    for uuid in report.curves.uuids:
        yield _figure(f"Free memory of {uuid}, down to zero", report.curves.free(uuid), at, sized=True)
    for uuid, used in header_used(report.known).items():
        yield _figure(f"Memory in use of {uuid} in the last minutes, second by second", [*used], at, sized=True)
    yield _figure("Running requests", report.curves.running, at, sized=False)


def _figure(title: str, points: list[Point], at: float | None, *, sized: bool) -> str:
    known = [value for _, value in points if value is not None]
    if not known:
        return ""
    times = [seconds for seconds, _ in points]
    frame = Frame(begin=min(times), end=max(times), top=MARGIN * max(known) or 1.0)
    stretches = drawing.thinned(drawing.through(points), COLUMNS)
    shapes = (
        drawing.curve(frame, stretches),
        "" if at is None else drawing.upright(frame, at),
        drawing.zero(frame) if sized else "",
    )
    top = size(frame.top) if sized else f"{frame.top:.0f}"
    return (
        f"<figure><figcaption>{_safe(title)}; the upright line is the end</figcaption><i>{top}</i>"
        f"{drawing.picture(frame, shapes, title=title)}"
        f"<div class=axis><span>{instant(frame.begin)}</span><span>{instant(frame.end)}</span></div></figure>"
    )


def _list(title: str, items: list[str]) -> str:
    lines = "".join(f"<li>{each}</li>" for each in items)
    return f"<h2>{escape(title)}</h2><ul>{lines}</ul>" if items else ""


def _step(what: str, link: str | None) -> str:
    return _safe(what) if link is None else f'{_safe(what)}: <a href="{escape(link)}">{escape(link)}</a>'


def _safe(text: str) -> str:
    return escape(text.translate(CONTROLS))
