"""Render the page: the worst situation first, then curves, then tables."""

from collections import Counter
from collections.abc import Iterator
from typing import Final
from urllib.parse import parse_qsl, urlencode

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.assets import PAGE_STYLE, POLICY, SCRIPT, build_icon
from vllm_headroom.expose.drawing import escape_text
from vllm_headroom.expose.figures import RANGES, draw_figures
from vllm_headroom.expose.tables import list_tables, render_table
from vllm_headroom.expose.times import render_time
from vllm_headroom.expose.view import LastIncident, View
from vllm_headroom.model import EnginePod, Snapshot, Values, Verdict
from vllm_headroom.units import format_duration, format_instant, format_size
from vllm_headroom.vocabulary import LEVEL_NAMES, Level, Situation

_HEADERS: Final[tuple[Header, ...]] = (
    NO_SNIFF,
    NO_STORE,
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", POLICY),
)
MIN_REFRESH_SECONDS: Final = 5
"""The shortest time between two loads of the page: a person needs time to read it."""

FOLDED_GPUS: Final = 3
"""At least this many GPUs in the same situation are folded into one line."""

SHOWN_EVENTS: Final = 10
"""Our choice: how many of the newest events the page lists. The snapshot has all."""

DOT: Final = " \N{MIDDLE DOT} "
LINKED_PATHS: Final = ("/metrics", "/snapshot.json", "/healthz", "/readyz")
"""The links at the bottom of the page."""


RANGE_QUERY: Final = "range"
"""The name of the query that chooses how much of the past the figures show."""


def respond_html(page: str) -> Response:
    """Return the page as an answer that loads nothing else and may not be framed."""
    return Response(
        status=200,
        body=page.encode(errors="replace"),
        content_type="text/html; charset=utf-8",
        headers=_HEADERS,
    )


def render_page(view: View, query: str = "") -> str:
    """Return the HTML page, which one script keeps up to date.

    `query` is the query of the request; its parameter `range` chooses how much of the past the
    figures show.
    """
    worst = view.shown_verdicts[0]
    title = f"{_render_headline(worst)}{DOT}vllm-headroom"
    header = _render_header(view)
    hero = _render_hero(view, worst)
    verdicts = _render_verdicts(view)
    sections = "".join(_render_sections(view, query))
    links = _render_links()
    # The script reads from this attribute of the body how often to reload the page.
    refresh_seconds = max(MIN_REFRESH_SECONDS, round(view.interval_seconds))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>"
        f'<link rel="icon" href="{build_icon(worst.level)}">'
        f"<style>{PAGE_STYLE}</style></head>"
        f"<body data-seconds={refresh_seconds}>"
        f"<header>{header}</header>"
        f"<main>{hero}{verdicts}{sections}</main>"
        f"<footer><p>{links} <button id=theme hidden>Theme</button></p></footer>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _render_header(view: View) -> str:
    """Return the names of host, engine and GPUs, the sample's age, the version and the notice."""
    if view.snapshot is None:
        sample_time = "the start"
        age = ""
    else:
        sample_time = format_instant(view.snapshot.time_seconds)
        seen = render_time(view.snapshot.time_seconds)
        age = f"seen {seen}, {format_duration(view.age_seconds)} ago; "
    names = escape_text(DOT.join(_list_names(view)))
    version = escape_text(view.version)
    notice = ""
    if view.notice:
        notice = f'<p class="notice">{escape_text(view.notice)}</p>'
    # If the sidecar does not answer, the script shows `data-seen` instead of the age.
    return (
        f"<p>{names}</p>"
        f'<p class=dim id=age data-seen="{sample_time}">{age}version {version}</p>'
        "<noscript><p>Without scripts this page does not change: load it again for newer figures."
        f"</p></noscript>{notice}"
    )


def _list_names(view: View) -> Iterator[str]:
    """Yield the names of pod or host, engine, models and GPUs, as far as they are known."""
    yield "vllm-headroom"
    if view.pod is not None:
        yield f"{view.pod.namespace}/{view.pod.pod}"
        yield f"container {view.pod.container}"
    elif view.host:
        yield view.host
    if view.engine_url:
        yield view.engine_url
    model_names = [labels[0] for labels in view.values.find_all(catalog.ENGINE_INFO)]
    yield from dict.fromkeys(model_names)
    if view.snapshot is None:
        return
    # Equal names are counted, because eight names of one kind of card would fill the header.
    gpu_names = [gpu.reading.name for gpu in view.snapshot.owned_gpus if gpu.reading.name]
    for gpu_name, count in Counter(gpu_names).items():
        yield gpu_name if count == 1 else f"{count} \N{MULTIPLICATION SIGN} {gpu_name}"


def _render_links() -> str:
    return DOT.join(f'<a href="{path}">{path}</a>' for path in LINKED_PATHS)


def _render_headline(verdict: Verdict) -> str:
    """Return the level and the situation of a verdict, such as "ALARM: GPU 0 leaking"."""
    # HEALTHY with an unknown level means that nothing is wrong, but a leak was not judged yet.
    if verdict.level is Level.UNKNOWN and verdict.situation is Situation.HEALTHY:
        situation = f"whether {verdict.subject} leaks"
    elif verdict.situation is Situation.HOST_LEAK:
        situation = f"{verdict.subject} leaking"
    else:
        situation = f"{verdict.subject} {verdict.situation.replace('_', ' ')}"
    return escape_text(f"{LEVEL_NAMES[verdict.level]}: {situation}")


def _render_hero(view: View, worst: Verdict) -> str:
    """Return the worst situation: its number, its sentence and the first thing to do."""
    number, caption = find_number(view, worst)
    figure = ""
    if number:
        figure = f"<b>{escape_text(number)} <small>{escape_text(caption)}</small></b>"
    action = ""
    # A healthy engine needs no advice.
    if worst.level is not Level.GOOD:
        advice = escape_text(_find_advice(view, worst))
        command = _render_command(_find_command(view, worst))
        action = f"<p>{advice}{command}{_render_runbook(view, worst)}</p>"
    headline = _render_headline(worst)
    sentence = escape_text(worst.sentence)
    return (
        f"<section class='hero {worst.level}'><h1>{headline}</h1>"
        f"{figure}<p>{sentence}</p>{action}</section>"
    )


NO_INCIDENT_ADVICE: Final = (
    "Read the engine's log. To keep an incident of each exit, set HEADROOM_STATE_DIR."
)
"""What to do after an exit without an incident on disk."""

UNJUDGED_ADVICE: Final = "Nothing yet: a leak shows only after some minutes of load."
"""What to do where nothing is wrong, but a leak is not judged yet."""

EXIT_SITUATIONS: Final = frozenset({Situation.CRASH_LOOP, Situation.DOWN})
"""Situations that begin with an exit, which the newest incident explains."""

COMMANDS: Final = {
    Situation.LEAKING: "vllm-headroom advise",
    Situation.GROWING: "vllm-headroom advise",
    Situation.HOST_LEAK: "vllm-headroom advise",
    Situation.LOW_MEMORY: "vllm-headroom advise",
    Situation.OVER_BUDGET: "vllm-headroom advise",
    Situation.BLIND: "vllm-headroom doctor",
}
"""The command that explains a situation further, to run in the sidecar's container."""


def _find_advice(view: View, worst: Verdict) -> str:
    """Return the first thing to do in a situation, among what this page can point to."""
    if worst.situation in EXIT_SITUATIONS and view.last_incident is None:
        return NO_INCIDENT_ADVICE
    if worst.situation is Situation.HEALTHY:
        return UNJUDGED_ADVICE
    return worst.situation.action


def _find_command(view: View, worst: Verdict) -> str | None:
    """Return the command that explains a situation further; None where there is none."""
    if worst.situation in EXIT_SITUATIONS and view.last_incident is not None:
        return view.last_incident.command
    return COMMANDS.get(worst.situation)


def _render_command(command: str | None) -> str:
    """Return a command with a button that copies it; empty without one.

    The script shows the button only if the browser allows copying.
    """
    if command is None:
        return ""
    return f" <code>{escape_text(command)}</code> <button class=copy hidden>Copy</button>"


TIME_LEFT_METRICS: Final = {
    Situation.LEAKING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.GROWING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.HOST_LEAK: (catalog.HOST_TIME_TO_OOM, catalog.HOST_TIME_TO_OOM_LOWER),
}
"""The metrics of the time left and of its lower bound, by the situation in which memory grows."""

WITHOUT_ROOM: Final = frozenset(
    {
        Situation.DOWN,
        Situation.BLIND,
        Situation.STARTING,
        Situation.STRANDED,
        Situation.FILLING,
    }
)
"""Situations in which the GPU's free memory does not matter, so the page does not emphasise it."""


def find_number(view: View, worst: Verdict) -> tuple[str, str]:
    """Return the number that matters most in a situation, and its caption; both may be empty.

    That is, by situation, the number of exits, the time left, the time without progress or the time
    since a start. In any other situation, or where that number is unknown, it is the free memory of
    the fullest GPU.
    """
    status = None if view.snapshot is None else view.snapshot.engine_status
    if worst.situation is Situation.CRASH_LOOP and status is not None:
        return f"{status.recent_exits} exits", "in the last 90 minutes"
    if worst.situation in TIME_LEFT_METRICS:
        time_left, earliest_time_left = TIME_LEFT_METRICS[worst.situation]
        left_seconds = min(view.values.find_all(time_left).values(), default=None)
        earliest_seconds = min(view.values.find_all(earliest_time_left).values(), default=None)
        if left_seconds is not None:
            return _format_range(earliest_seconds, left_seconds), "until out of memory"
    age_seconds = view.values.value(catalog.ENGINE_PROGRESS_AGE)
    if worst.situation is Situation.STALLED and age_seconds is not None:
        return format_duration(age_seconds), "without progress"
    started_at = view.values.value(catalog.ENGINE_START)
    if (
        worst.situation is Situation.STARTING
        and started_at is not None
        and view.snapshot is not None
    ):
        return format_duration(view.snapshot.time_seconds - started_at), "since it was started"
    if worst.situation in WITHOUT_ROOM:
        # In these situations, free memory would distract from the trouble.
        return "", ""
    return _find_free_memory(view.values)


def _format_range(earliest_seconds: float | None, likely_seconds: float) -> str:
    """Return the time left as a range, the earliest end first."""
    likely = format_duration(likely_seconds)
    if earliest_seconds is None:
        return f"about {likely}"
    earliest = format_duration(earliest_seconds)
    return likely if earliest == likely else f"{earliest} to {likely}"


def _find_free_memory(values: Values) -> tuple[str, str]:
    """Return the free memory of the fullest GPU, and a caption; both empty where none is known."""
    free_bytes = values.find_all(catalog.GPU_MEMORY_FREE)
    if not free_bytes:
        return "", ""
    fullest_gpu = min(free_bytes, key=lambda labels: free_bytes[labels])
    total_bytes = values.value(catalog.GPU_MEMORY_TOTAL, *fullest_gpu)
    of_total = "" if total_bytes is None else f" of {format_size(total_bytes)}"
    gpu_name = f"GPU {fullest_gpu[0]}"
    if len(free_bytes) > 1:
        gpu_name += ", the fullest"
    return format_size(free_bytes[fullest_gpu]), f"free{of_total} on {gpu_name}"


def _render_verdicts(view: View) -> str:
    """Return the verdicts after the worst one, which the hero shows.

    If many GPUs share the situation of the worst verdict, they are folded into one line that can be
    opened. So are the healthy GPUs.
    """
    worst, *verdicts = view.shown_verdicts
    verdicts, healthy_line = _fold_gpus(view, verdicts, Situation.HEALTHY)
    verdicts, alike_line = _fold_gpus(view, verdicts, worst.situation)
    return f"{alike_line}{_render_list(view, verdicts)}{healthy_line}"


def _fold_gpus(
    view: View, verdicts: list[Verdict], situation: Situation
) -> tuple[list[Verdict], str]:
    """Return the verdicts that are not folded, and the line of the folded GPUs.

    The GPUs in `situation` are folded. Where there are few of them, all verdicts are returned with
    an empty line.
    """
    folded = [
        verdict
        for verdict in verdicts
        if verdict.situation is situation and verdict.subject.startswith("GPU ")
    ]
    if len(folded) < FOLDED_GPUS:
        return verdicts, ""
    # A few lines are read faster than unfolded.
    unfolded = [verdict for verdict in verdicts if verdict not in folded]
    summary = _summarize_gpus(view, folded)
    line = f"<details><summary>{summary}</summary>{_render_list(view, folded)}</details>"
    return unfolded, line


def _render_list(view: View, verdicts: list[Verdict]) -> str:
    """Return the verdicts as a list; empty without any."""
    lines = "".join(_render_sentence(view, verdict) for verdict in verdicts)
    return f"<ul class=verdicts>{lines}</ul>" if lines else ""


def _summarize_gpus(view: View, verdicts: list[Verdict]) -> str:
    """Return one line for at least one GPU, all in the same situation."""
    situation = verdicts[0].situation
    level = verdicts[0].level
    if situation is not Situation.HEALTHY:
        numbers = ", ".join(verdict.subject.removeprefix("GPU ") for verdict in verdicts)
        situation_name = situation.replace("_", " ")
        level_name = f"<b class={level}>{LEVEL_NAMES[level]}</b>"
        gpus = f"{len(verdicts)} more GPUs {situation_name}: {escape_text(numbers)}"
        return f"{level_name} {gpus}"
    summary = f"{len(verdicts)} GPUs quiet"
    free_bytes = _find_lowest_free(view, {verdict.subject for verdict in verdicts})
    if free_bytes is not None:
        summary += f", at least {format_size(free_bytes)} free on each GPU"
    return summary


def _find_lowest_free(view: View, subjects: set[str]) -> int | None:
    """Return the least free memory on the GPUs of these verdicts; None where it is unknown."""
    if view.snapshot is None:
        return None
    gpus = [gpu for gpu in view.snapshot.owned_gpus if gpu.reading.display_name in subjects]
    memories = [gpu.reading.memory for gpu in gpus if gpu.reading.memory is not None]
    return min((memory.free_bytes for memory in memories), default=None)


def _render_sentence(view: View, verdict: Verdict) -> str:
    level_name = f"<b>{LEVEL_NAMES[verdict.level]}</b>"
    sentence = f"{escape_text(verdict.sentence)}{_render_runbook(view, verdict)}"
    return f"<li class={verdict.level}>{level_name} {sentence}</li>"


def _render_runbook(view: View, verdict: Verdict) -> str:
    """Return a link to the runbook of a verdict's alert; empty without an alert or runbooks."""
    url = view.find_runbook(verdict.alert)
    if url is None:
        return ""
    return f' <a href="{escape_text(url)}">Runbook</a>'


def _render_sections(view: View, query: str) -> Iterator[str]:
    """Yield the sections below the verdicts: figures, tables, last incident and newest events."""
    if view.snapshot is not None:
        yield from _render_figures(view, view.snapshot, query)
        for table in list_tables(view.values, view.snapshot):
            yield render_table(table)
    if view.last_incident is not None:
        yield _render_incident(view.last_incident, view.pod)
    if view.history.events:
        yield "<h2>What changed</h2><ul>"
        for event in reversed(view.history.events[-SHOWN_EVENTS:]):
            level_name = f"<b class={event.level}>{LEVEL_NAMES[event.level]}</b>"
            time = render_time(event.seconds)
            text = escape_text(event.text)
            yield f"<li>{level_name} {time} {text}</li>"
        yield "</ul>"


def _render_figures(view: View, snapshot: Snapshot, query: str) -> Iterator[str]:
    """Yield the links that choose how much of the past is shown, and the figures.

    Nothing without figures.
    """
    options = dict(parse_qsl(query))
    chosen = options.get(RANGE_QUERY, "")
    figures = list(draw_figures(view, snapshot, RANGES.get(chosen)))
    if not figures:
        return
    links = []
    for name in ("", *RANGES):
        # Links, not buttons, so that they work without scripts. Other query parameters stay, such
        # as `engine`.
        others = {key: value for key, value in options.items() if key != RANGE_QUERY}
        address = urlencode({**others, RANGE_QUERY: name} if name else others)
        current = " aria-current=true" if name == chosen else ""
        text = name or "auto"
        links.append(f'<a href="/?{escape_text(address)}"{current}>{text}</a>')
    yield f"<nav class=dim aria-label=Past>Past shown: {DOT.join(links)}</nav>"
    yield from figures


def _render_incident(incident: LastIncident, pod: EnginePod | None) -> str:
    """Return the section on the last incident, with the command that explains it."""
    time = render_time(incident.seconds)
    kind = escape_text(incident.kind)
    command = _render_command(incident.command)
    cause = ""
    if incident.sentence is not None:
        cause = f" <b>{escape_text(incident.sentence)}</b>"
    last_words = ""
    if pod is not None:
        last_words = f"{_render_command(pod.log_command)} has the engine's last words."
    return (
        f"<h2>Last incident</h2><p>{time}: the engine {kind}.{cause} "
        f"{command}, run in the sidecar's container, has the evidence.{last_words}</p>"
    )
