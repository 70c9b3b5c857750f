"""Render the page: the worst situation first, then curves, then tables."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.drawing import STYLE, escape_text
from vllm_headroom.expose.figures import HOUR_SECONDS, draw_figures
from vllm_headroom.expose.view import View
from vllm_headroom.model import Metric, Snapshot, Values, Verdict, find_part
from vllm_headroom.units import format_duration, format_gib, format_instant, format_size
from vllm_headroom.vocabulary import WORDS, Level, Situation

_LEVELS: Final = "".join(
    f".hero.{level},li.{level}{{border-color:var(--{level})}}.{level} b,.{level} h1,b.{level}{{color:var(--{level})}}"
    for level in Level
)
PAGE_STYLE: Final = (
    f"{STYLE}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem;color:var(--ink);"
    "background:var(--ground);overflow-wrap:anywhere}h1{font-size:1.15rem;margin:0}"
    "h2{font-size:1.05rem;margin:1.6rem 0 .3rem}p{margin:.3rem 0}a{color:inherit}.dim,figcaption{color:var(--dim)}"
    ".hero{border-left:.5rem solid;padding:.2rem 1rem;margin:1rem 0}.hero>b{display:block;font-size:2.6rem;"
    "line-height:1.2}.hero>b small{display:inline-block;font-size:1rem;line-height:1.4;"
    "font-weight:400;color:var(--dim)}.hero p{font-size:1.1rem}"
    ".verdicts{list-style:none;margin:1rem 0;padding:0}li[class]{border-left:.35rem solid;padding:.2rem .8rem;"
    "margin:.4rem 0}.verdicts li>b{font-size:.8rem;letter-spacing:.05em}summary{cursor:pointer}"
    f"{_LEVELS}figure{{margin:1rem 0;position:relative}}"
    "figure>i{position:absolute;right:0;font:.85rem system-ui,sans-serif;color:var(--dim)}"
    "svg{display:block;width:100%;height:11rem;border-top:1px solid var(--line)}"
    ".strip svg{height:2.5rem}.rooms svg{height:4rem}.axis{display:flex;gap:.5rem;justify-content:space-between;"
    "color:var(--dim);font-size:.85rem}.axis.ahead span{flex:1;text-align:right}"
    ".axis.ahead span:first-child{text-align:left}.key{font-size:.85rem;color:var(--dim)}"
    ".key span{margin-right:1rem;display:inline-block}.key i{display:inline-block;width:1.2rem;margin-right:.3rem;"
    "border-top:.2rem solid var(--room);vertical-align:middle}.key .low{border-top:1px solid var(--peak)}"
    ".key .to{border-top:.15rem dashed var(--alarm)}.key .at{width:0;height:.9rem;border:0;"
    "border-left:2px dashed var(--dim)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);white-space:nowrap}"
    ".words td:last-child,tbody th{white-space:normal}.words td:last-child{min-width:16rem}"
    ".figures td,.figures th~th{text-align:right;font-variant-numeric:tabular-nums}"
    ".rooms{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(17rem,100%),1fr));column-gap:1.5rem}"
    ".rooms figure{margin:.5rem 0}.rooms figure>i,.rooms .ahead span:not(:last-child){display:none}"
    ".notice{border:1px solid var(--warning);padding:.4rem .8rem}"
    "@media(max-width:36rem){thead{display:none}tr,th,td{display:block;border:0}tr{border-bottom:1px solid "
    "var(--line);padding:.3rem 0}td,.figures td{text-align:left;white-space:normal}"
    'td::before{content:attr(data-t) ": ";color:var(--dim)}}'
    "@media print{body{max-width:none}svg{break-inside:avoid}}"
)
SCRIPT: Final = """\
(() => {
  const places = () => [...document.querySelectorAll("a,summary,[tabindex]")];
  const swap = (old, fresh) => {
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    fresh.querySelectorAll("details").forEach((each, place) => { each.open = open[place] ?? each.open; });
    old.replaceWith(fresh);
  };
  const turn = async () => {
    if (document.hidden || getSelection().type === "Range") return;
    const age = document.getElementById("age");
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const focused = places().indexOf(document.activeElement);
      for (const part of ["header", "main"]) {
        const [old, fresh] = [document, next].map((each) => [...each.querySelector(part).children]);
        if (old.length === fresh.length) old.forEach((each, place) =>
          each.outerHTML === fresh[place].outerHTML || swap(each, fresh[place]));
        else swap(document.querySelector(part), next.querySelector(part));
      }
      document.title = next.title;
      document.querySelector("link[rel=icon]").href = next.querySelector("link[rel=icon]").href;
      if (focused >= 0) places()[focused]?.focus({preventScroll: true});
    } catch { age.textContent = `No answer from the sidecar since ${age.dataset.seen}: what follows is old.`; }
  };
  setInterval(turn, 1000 * document.body.dataset.seconds);
})();
"""
"""Replaces what has changed, and leaves scroll position, focus, selection and opened parts as they are."""


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_hash(PAGE_STYLE)}'; script-src 'sha256-{_hash(SCRIPT)}';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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

MANY: Final = 3
"""From so many GPUs in the same situation on, they are folded into one line."""

DOT: Final = " \N{MIDDLE DOT} "
PATHS: Final = ("/metrics", "/snapshot.json", "/healthz", "/readyz")


def respond_html(page: str) -> Response:
    """Return the page as an answer that loads nothing else, runs one script and may not be framed."""
    return Response(
        status=200,
        body=page.encode(errors="replace"),
        content_type="text/html; charset=utf-8",
        headers=_HEADERS,
    )


def render_page(view: View) -> str:
    """Return the HTML page, which one script keeps up to date."""
    notice = f'<p class="notice">{escape_text(view.notice)}</p>' if view.notice else ""
    first, seconds = (
        view.shown_verdicts[0],
        max(LEAST_REFRESH_SECONDS, round(view.interval_seconds)),
    )
    seen = "the start" if view.snapshot is None else format_instant(view.snapshot.time_seconds)
    age = "" if view.snapshot is None else f"seen {seen}, {format_duration(view.age_seconds)} ago; "
    links = DOT.join(f'<a href="{path}">{path}</a>' for path in PATHS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_render_headline(first)}{DOT}vllm-headroom</title>"
        f'<link rel="icon" href="{build_icon(first.level)}"><style>{PAGE_STYLE}</style></head>'
        f"<body data-seconds={seconds}><header><p>{escape_text(DOT.join(_list_names(view)))}</p>"
        f'<p class=dim id=age data-seen="{seen}">{age}version {escape_text(view.version)}</p>'
        "<noscript><p>Without scripts this page does not change: load it again for newer figures.</p></noscript>"
        f"{notice}</header><main>{_render_hero(view, first)}{_render_verdicts(view)}"
        f"{''.join(_render_rest(view))}</main><footer><p>{links}</p></footer><script>{SCRIPT}</script></body></html>\n"
    )


def _list_names(view: View) -> Iterator[str]:
    """Yield whose page it is: pod or host, engine, models and GPUs."""
    yield from filter(None, ("vllm-headroom", view.host, view.engine_url))
    yield from dict.fromkeys(labels[0] for labels in view.values.find_all(catalog.ENGINE_INFO))
    owned = () if view.snapshot is None else view.snapshot.owned_gpus
    for name, count in Counter(gpu.reading.name for gpu in owned if gpu.reading.name).items():
        yield f"{count} \N{MULTIPLICATION SIGN} {name}" if count > 1 else name


def _render_headline(verdict: Verdict) -> str:
    is_unsure = verdict.level is Level.UNKNOWN and verdict.situation is Situation.HEALTHY
    what = (
        f"whether {verdict.subject} leaks"
        if is_unsure
        else f"{verdict.subject} {verdict.situation.replace('_', ' ')}"
    )
    return escape_text(f"{WORDS[verdict.level]}: {what}")


def _render_hero(view: View, first: Verdict) -> str:
    """Return the worst situation: its number, its sentence and the first thing to do."""
    number, of = _find_number(view, first)
    figure = f"<b>{escape_text(number)} <small>{escape_text(of)}</small></b>" if number else ""
    todo = (
        ""
        if first.level is Level.GOOD
        else f"<p>{escape_text(first.situation.action)}{_link(view, first)}</p>"
    )
    return (
        f"<section class='hero {first.level}'><h1>{_render_headline(first)}</h1>{figure}"
        f"<p>{escape_text(first.sentence)}</p>{todo}</section>"
    )


GROWS: Final = {
    Situation.LEAKING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.GROWING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.HOST_LEAK: (catalog.HOST_TIME_TO_OOM, catalog.HOST_TIME_TO_OOM_LOWER),
}
WITHOUT_ROOM: Final = {Situation.DOWN, Situation.BLIND}
"""Situations in which free memory is not what matters."""


def _find_number(view: View, first: Verdict) -> tuple[str, str]:
    """Return the number that matters in a situation, and what it is; empty where none is known."""
    values, engine_status = (
        view.values,
        None if view.snapshot is None else view.snapshot.engine_status,
    )
    if first.situation is Situation.CRASH_LOOP and engine_status is not None:
        return f"{engine_status.recent_ends} exits", "in the last 90 minutes"
    left, least = (
        min(values.find_all(each).values(), default=None)
        for each in GROWS.get(first.situation, GROWS[Situation.LEAKING])
    )
    if first.situation in GROWS and left is not None:
        earliest = "" if least is None else f", at the earliest in {format_duration(least)}"
        return format_duration(left), f"until out of memory{earliest}"
    age = values.value(catalog.ENGINE_PROGRESS_AGE)
    if first.situation is Situation.STALLED and age is not None:
        return format_duration(age), "without progress"
    free = values.find_all(catalog.GPU_MEMORY_FREE)
    if first.situation in WITHOUT_ROOM or not free:
        return "", ""
    labels = min(free, key=lambda each: free[each])
    total = values.value(catalog.GPU_MEMORY_TOTAL, *labels)
    of = "" if total is None else f" of {format_size(total)}"
    where = f"GPU {labels[0]}, the fullest" if len(free) > 1 else f"GPU {labels[0]}"
    return format_size(free[labels]), f"free{of} on {where}"


def _render_verdicts(view: View) -> str:
    """Return the verdicts after the first; many quiet GPUs, and many in its situation, are one line that opens."""
    rest, quiet = _fold(view, view.shown_verdicts[1:], Situation.HEALTHY)
    rest, alike = _fold(view, rest, view.shown_verdicts[0].situation)
    return f"{alike}{_render_list(view, rest)}{quiet}"


def _fold(
    view: View, verdicts: tuple[Verdict, ...], situation: Situation
) -> tuple[tuple[Verdict, ...], str]:
    """Return the verdicts that stay, and the line of the GPUs in a situation, empty where they are few."""
    alike = tuple(
        each for each in verdicts if each.situation is situation and each.subject.startswith("GPU ")
    )
    if len(alike) < MANY:
        return verdicts, ""
    rest = tuple(each for each in verdicts if each not in alike)
    return (
        rest,
        f"<details><summary>{_sum_up(view, alike)}</summary>{_render_list(view, alike)}</details>",
    )


def _render_list(view: View, verdicts: tuple[Verdict, ...]) -> str:
    lines = "".join(_render_sentence(view, each) for each in verdicts)
    return f"<ul class=verdicts>{lines}</ul>" if lines else ""


def _sum_up(view: View, alike: tuple[Verdict, ...]) -> str:
    """Return one line for GPUs in the same situation."""
    first, names = alike[0], {each.subject for each in alike}
    if first.situation is not Situation.HEALTHY:
        numbers = ", ".join(each.subject.removeprefix("GPU ") for each in alike)
        word = first.situation.replace("_", " ")
        return f"<b class={first.level}>{WORDS[first.level]}</b> {len(alike)} more GPUs {word}: {escape_text(numbers)}"
    owned = view.snapshot.owned_gpus if view.snapshot else ()
    rooms = (gpu.reading.memory for gpu in owned if gpu.reading.display_name in names)
    free = min((memory.free_bytes for memory in rooms if memory is not None), default=None)
    return f"{len(alike)} GPUs quiet" + (
        "" if free is None else f", at least {format_size(free)} free on each GPU"
    )


def _render_rest(view: View) -> Iterator[str]:
    if view.snapshot is not None:
        yield from draw_figures(view, view.snapshot)
        yield _render_table("Who holds the memory", _list_gpus(view.values))
        yield _render_table("Host memory by process", _list_roles(view.values))
        yield _render_table("Engines", _list_engines(view.values))
        yield _render_table("Sources", _list_sources(view.values, view.snapshot), kind="words")
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
    word = f"<b>{WORDS[verdict.level]}</b>"
    return f"<li class={verdict.level}>{word} {escape_text(verdict.sentence)}{_link(view, verdict)}</li>"


def _link(view: View, verdict: Verdict) -> str:
    where = view.find_runbook(verdict.alert)
    return "" if where is None else f' <a href="{escape_text(where)}">What&nbsp;to&nbsp;do</a>'


HOLDERS: Final = ("engine", "other", "unattributed")
NOT_KNOWN: Final = "not known"


def _list_gpus(values: Values) -> Iterator[tuple[str, ...]]:
    yield ("GPU", *HOLDERS, "free", "total")
    for gpu, uuid, name, attribution in values.find_all(catalog.GPU_INFO):
        held = (values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, holder) for holder in HOLDERS)
        room = (
            values.value(metric, gpu, uuid)
            for metric in (catalog.GPU_MEMORY_FREE, catalog.GPU_MEMORY_TOTAL)
        )
        which = gpu if find_part(uuid) in name else f"{gpu} {find_part(uuid)}"
        whose = f"the engine's by {attribution}" if attribution else "not the engine's"
        yield (f"{which} {name}, {whose}", *map(_format_gib, (*held, *room)))


def _list_roles(values: Values) -> Iterator[tuple[str, ...]]:
    yield ("processes", "resident", "swapped out", "leak", "growth an hour")
    for (role,), resident in values.find_all(catalog.HOST_MEMORY).items():
        held = map(_format_gib, (resident, values.value(catalog.HOST_SWAP, role)))
        rate = values.value(catalog.HOST_LEAK_RATE, role)
        growth = "" if rate is None else format_size(HOUR_SECONDS * rate)
        yield (role, *held, values.state(catalog.HOST_LEAK_STATE, role) or NOT_KNOWN, growth)


def _list_engines(values: Values) -> Iterator[tuple[str, ...]]:
    yield ("engine", *(title for title, _, _ in ENGINE))
    for model_name, engine, _profile in values.find_all(catalog.ENGINE_INFO):
        shown = (
            NOT_KNOWN
            if (value := values.value(metric, model_name, engine)) is None
            else form.format(value)
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
    yield ("source", "last reading", "took", "last worked", "cause and cure")
    failures = {str(failure.source): failure for failure in snapshot.failures}
    for (source,), up in values.find_all(catalog.SOURCE_UP).items():
        took = values.value(catalog.SOURCE_READ_SECONDS, source)
        worked = values.value(catalog.SOURCE_LAST_SUCCESS, source)
        ago = (
            "never"
            if worked is None
            else f"{format_duration(max(0.0, snapshot.time_seconds - worked))} before"
        )
        failure = failures.get(source)
        yield (
            source,
            "answers" if up else "failed",
            NOT_KNOWN if took is None else f"{1000 * took:.1f} ms",
            "this time" if up else ago,
            "" if failure is None else f"{failure.reason}: {failure.message}",
        )


def _render_table(title: str, rows: Iterator[tuple[str, ...]], *, kind: str = "figures") -> str:
    """Return a table of this class with a heading, empty without rows; the first is that of the columns' titles."""
    head = [escape_text(each) for each in next(rows)]
    lines = "".join(
        f"<tr><th scope=row>{escape_text(first)}</th>"
        + "".join(
            f'<td data-t="{name}">{escape_text(cell)}</td>'
            for name, cell in zip(head[1:], rest, strict=True)
        )
        + "</tr>"
        for first, *rest in rows
    ).replace(">failed</td>", "><b class=alarm>failed</b></td>")
    titles = "".join(f"<th scope=col>{each}</th>" for each in head)
    if not lines:
        return ""
    return (
        f'<h2>{escape_text(title)}</h2><div class=wide role=region tabindex=0 aria-label="{escape_text(title)}">'
        f"<table class={kind}><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _format_gib(n_bytes: float | None) -> str:
    return NOT_KNOWN if n_bytes is None else format_gib(n_bytes)
