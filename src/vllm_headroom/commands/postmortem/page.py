"""A post-mortem as one file of HTML, which loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.postmortem.finding import TODO, Sureness
from vllm_headroom.commands.postmortem.known import MOST_SHOWN, header_used
from vllm_headroom.commands.postmortem.report import Postmortem, sections
from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import Frame, Point, escaped
from vllm_headroom.expose.page.style import PAGE_STYLE
from vllm_headroom.units import instant, size
from vllm_headroom.vocabulary import Level

COLUMNS: Final = 480
_LINK: Final = re.compile("|".join({re.escape(link) for steps in TODO.values() for _, link in steps if link}))
"""Our own: what a file has from anywhere leads nowhere."""

LEVELS: Final = {Sureness.SURE: Level.ALARM, Sureness.LIKELY: Level.WARNING, Sureness.POSSIBLE: Level.UNKNOWN}


def page(report: Postmortem) -> str:
    """Return the page."""
    title = f"Post-mortem: {report.answer.sentence}"
    when = "" if report.facts is None else instant(report.facts.seconds)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{PAGE_STYLE}</style></head><body>"
        f"<header><h1>Post-mortem</h1><p class=dim>{when} {escaped(report.file)}</p></header><main>"
        f"{''.join(_body(report))}</main></body></html>\n"
    )


def _body(report: Postmortem) -> Iterator[str]:
    yield "<ul class=verdicts>"
    for finding in report.findings:
        yield (
            f"<li class={LEVELS[finding.sureness]}><b>{finding.sureness.upper()}</b> {escaped(finding.sentence)}"
            f"<ul>{''.join(f'<li>{escaped(each)}</li>' for each in finding.evidence)}</ul></li>"
        )
    yield "</ul>"
    yield from _figures(report)
    for title, lines in sections(report, MOST_SHOWN):
        items = (f"<b>{escaped(head)}</b> {escaped(body)}" for head, body in lines)
        yield _list(title, [_LINK.sub(r'<a href="\g<0>">\g<0></a>', item) for item in items])


def _figures(report: Postmortem) -> Iterator[str]:
    at = None if report.facts is None else report.facts.seconds
    gpus = {} if report.facts is None else {gpu.uuid: gpu for gpu in report.facts.gpus}
    used = header_used(report.known)
    for uuid in report.curves.uuids:
        gpu = gpus.get(uuid)
        what = f"Free memory of {uuid if gpu is None else gpu.called}"
        yield _figure(f"{what}, down to zero", report.curves.free(uuid), at, sized=True)
        if gpu is not None and gpu.usable_bytes is not None:
            free: list[Point] = [(seconds, gpu.usable_bytes - n_bytes) for seconds, n_bytes in used.get(uuid, ())]
            yield _figure(f"{what} in the last minutes, second by second", free, at, sized=True)
    yield _figure("Running requests", report.curves.running, at, sized=False)


def _figure(title: str, points: list[Point], at: float | None, *, sized: bool) -> str:
    known = [value for seconds, value in points if value is not None and (at is None or not sized or seconds <= at)]
    if not known:
        return ""
    times = [seconds for seconds, _ in points]
    frame = Frame(begin=min(times), end=max(times), top=drawing.scale(known) if sized else max(known))
    stretches = drawing.thinned(drawing.through(points), COLUMNS)
    shapes = (
        drawing.curve(frame, stretches),
        "" if at is None else drawing.upright(frame, at),
        drawing.zero(frame) if sized else "",
    )
    top = size(frame.top) if sized else f"{frame.top:.0f}"
    return (
        f"<figure><figcaption>{escaped(title)}; the upright line is the end</figcaption><i>{top}</i>"
        f"{drawing.picture(frame, shapes, title=title)}"
        f"<div class=axis><span>{instant(frame.begin)}</span><span>{instant(frame.end)}</span></div></figure>"
    )


def _list(title: str, items: list[str]) -> str:
    lines = "".join(f"<li>{each}</li>" for each in items)
    return f"<h2>{escaped(title)}</h2><ul>{lines}</ul>" if items else ""
