"""Render the page: the worst situation first, then curves, then tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final
from urllib.parse import parse_qsl, urlencode

from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Response
from vllm_headroom.expose.assets import PAGE_STYLE, POLICY, SCRIPT, build_icon
from vllm_headroom.expose.drawing import escape_text, render_text
from vllm_headroom.expose.figures import RANGES, draw_figures
from vllm_headroom.expose.tables import list_tables, render_table
from vllm_headroom.expose.times import render_time
from vllm_headroom.expose.view import LastIncident, VerdictStart, View
from vllm_headroom.model import EnginePod, Failure, Snapshot, Values, Verdict
from vllm_headroom.units import HOUR_SECONDS, format_duration, format_instant, format_size
from vllm_headroom.vocabulary import LEVEL_NAMES, Level, Reason, Situation

_HEADERS: Final[tuple[Header, ...]] = (
    NO_SNIFF,
    NO_STORE,
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", POLICY),
)
MIN_REFRESH_SECONDS: Final = 5
"""The minimum time between two reloads of the page. People need time to read it."""

FOLDED_GPUS: Final = 3
"""At least this many GPUs in the same situation are folded into one line."""

SHOWN_EVENTS: Final = 10
"""The number of newest events listed on the page (our choice). The snapshot lists all events."""

DOT: Final = " \N{MIDDLE DOT} "
LINKED_PATHS: Final = ("/metrics", "/snapshot.json", "/healthz", "/readyz")
"""The links at the bottom of the page."""


RANGE_QUERY: Final = "range"
"""The query parameter that selects how much of the past the figures show."""


def respond_html(page: str) -> Response:
    """Return the page as a response whose headers forbid framing and loading other resources."""
    return Response(
        status=200,
        body=page.encode(errors="replace"),
        content_type="text/html; charset=utf-8",
        headers=_HEADERS,
    )


def render_page(view: View, query: str = "") -> str:
    """Return the HTML page; its script keeps it up to date.

    `query` is the request's query. The query parameter `range` selects how much of the past the
    figures show.
    """
    worst = view.shown_verdicts[0]
    title = f"{_render_headline(view, worst)}{DOT}vllm-headroom"
    header = _render_header(view)
    hero = _render_hero(view, worst)
    verdicts = _render_verdicts(view)
    sections = "".join(_render_sections(view, query))
    links = _render_links()
    # The body's attribute holds the interval at which the script reloads the page.
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
    """Return the names, the sample's age, the version and the notice.

    The names are those of the host, the engine and the GPUs.
    """
    names = escape_text(DOT.join(_list_names(view)))
    seconds = None
    if view.snapshot is not None:
        seconds = view.snapshot.time_seconds
    notice = ""
    if view.notice:
        notice = f'<p class="notice">{escape_text(view.notice)}</p>'
    return (
        f"<p>{names}</p>{render_age(seconds, view.age_seconds, view.version)}"
        "<noscript><p>Without scripts this page does not change: load it again for newer figures."
        f"</p></noscript>{notice}"
    )


def render_age(seconds: float | None, age_seconds: float, version: str) -> str:
    """Return the version and the latest sample's age; `seconds` is None before the first sample."""
    sample_time = "the start"
    age = ""
    if seconds is not None:
        sample_time = format_instant(seconds)
        age = f"seen {render_time(seconds)}, {render_text(format_duration(age_seconds))} ago; "
    # If the sidecar does not respond, the script shows `data-seen` instead of the age.
    return f'<p class=dim id=age data-seen="{sample_time}">{age}version {escape_text(version)}</p>'


def _list_names(view: View) -> Iterator[str]:
    """Yield the names of the pod or host, the engine, models and GPUs.

    Unknown names are omitted.
    """
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
    # Cards with the same name are counted. Without the counting, eight copies of the name would
    # fill the header.
    gpu_names = [gpu.reading.name for gpu in view.snapshot.owned_gpus if gpu.reading.name]
    for gpu_name, count in Counter(gpu_names).items():
        yield gpu_name if count == 1 else f"{count} \N{MULTIPLICATION SIGN} {gpu_name}"


def _render_links() -> str:
    return DOT.join(f'<a href="{path}">{path}</a>' for path in LINKED_PATHS)


HEADLINES: Final = {
    Situation.BLIND: "{subject} cannot be read",
    Situation.DOWN: "{subject} down",
    Situation.STALLED: "{subject} stalled",
    Situation.HOST_LEAK: "{subject} leaking",
    Situation.LOW_MEMORY: "{subject} low on memory",
    Situation.OVER_BUDGET: "{subject} over the engine's budget",
    Situation.NEIGHBOUR: "{subject} used by other processes",
    Situation.STRANDED: "KV cache held by no request",
    Situation.FILLING: "{subject} filling as configured",
}
"""The headlines of some situations. In other situations, the headline is the subject followed by
the situation's name.
"""


SUBJECT_HEADLINES: Final = {"sidecar": "sidecar blind", "gates": "gate closed"}
"""The headlines of verdicts that concern neither the engine, its GPUs nor host memory."""


def _render_headline(view: View, worst: Verdict) -> str:
    """Return the level and situation of the worst verdict, such as "ALARM: GPU 0 leaking"."""
    subject = worst.subject
    alike_gpus = _list_alike_gpus(view, worst)
    if len(alike_gpus) > 1:
        subject = f"{len(alike_gpus)} GPUs"
    text = HEADLINES.get(worst.situation, f"{{subject}} {worst.situation.replace('_', ' ')}")
    # HEALTHY with an unknown level means that no problem was found. In that case, there is no
    # verdict on leaks yet.
    if worst.situation is Situation.HEALTHY and worst.level is Level.GOOD:
        text = "all healthy"
    elif worst.situation is Situation.HEALTHY and worst.level is Level.UNKNOWN:
        text = "whether {subject} leaks"
    text = SUBJECT_HEADLINES.get(subject, text)
    headline = text.replace("{subject}", subject)
    if worst.situation is Situation.CRASH_LOOP:
        situations = {verdict.situation for verdict in view.shown_verdicts}
        if Situation.DOWN in situations:
            headline += ", and down now"
        elif Situation.STARTING in situations:
            headline += ", and starting again"
        elif _find_contradictions(view):
            headline += ", and serving now"
    return escape_text(f"{LEVEL_NAMES[worst.level]}: {headline}")


def _list_alike_gpus(view: View, worst: Verdict) -> list[str]:
    """Return the GPUs in the worst verdict's situation.

    The list is empty if the verdict is not about a GPU.
    """
    if not worst.subject.startswith("GPU "):
        return []
    subjects = [
        verdict.subject
        for verdict in view.shown_verdicts
        if verdict.situation is worst.situation and verdict.level is worst.level
    ]
    return [subject for subject in dict.fromkeys(subjects) if subject.startswith("GPU ")]


def _render_hero(view: View, worst: Verdict) -> str:
    """Return the worst situation: its key figure, its sentence and the first thing to do."""
    number, caption = find_key_figure(view, worst)
    figure = ""
    if number:
        figure = f"<b>{render_text(number)} <small>{render_text(caption)}</small></b>"
    action = ""
    # A healthy engine does not need advice.
    if worst.level is not Level.GOOD:
        advice = escape_text(find_advice(view, worst))
        action = f"<p>{advice}{_render_runbook(view, worst)}</p>{_render_explained(view, worst)}"
    headline = _render_headline(view, worst)
    since = render_since(view, worst)
    sentence = render_text(worst.sentence)
    details = "".join(f"<p>{render_text(detail)}</p>" for detail in _list_details(view, worst))
    return (
        f"<section class='hero {worst.level}'><h1>{headline}{since}</h1>"
        f"{figure}<p>{sentence}</p>{details}{action}</section>"
    )


DURATION_SITUATIONS: Final = frozenset(
    {
        Situation.DOWN,
        Situation.BLIND,
        Situation.STALLED,
        Situation.STARTING,
    }
)
"""Situations whose key figure is already a duration. The headline of such a situation contains only
the time at which the situation began.
"""


def render_since(view: View, worst: Verdict) -> str:
    """Return when the situation began, or "" if that is unknown or all is well."""
    if worst.situation is Situation.HEALTHY or view.snapshot is None:
        return ""
    verdict = worst
    if worst.situation is Situation.CRASH_LOOP:
        # In a crash loop, the current downtime matters more than the loop's length.
        verdict = _find_down(view) or worst
    start = _find_start(view, verdict)
    if start is None:
        return ""
    time = render_time(start.seconds)
    if verdict.situation in DURATION_SITUATIONS and verdict is worst:
        if not start.is_exact:
            time += " or earlier"
        return f" <small>since {time}</small>"
    elapsed_seconds = view.snapshot.time_seconds - start.seconds
    duration = render_text(format_duration(max(0.0, elapsed_seconds)))
    if not start.is_exact:
        duration = f"at least {duration}"
    return f" <small>for {duration}, since {time}</small>"


def _find_down(view: View) -> Verdict | None:
    """Return the verdict that the engine is down, or None if it is not."""
    for verdict in view.shown_verdicts:
        if verdict.situation is Situation.DOWN:
            return verdict
    return None


def _find_start(view: View, verdict: Verdict) -> VerdictStart | None:
    """Return when a verdict began, or None if unknown.

    A stall begins at the last progress, as in the page's key figure. An engine's start begins when
    its process starts. Both beginnings are earlier than the first sample with the verdict.
    """
    start = view.find_start(verdict)
    began_seconds = None
    if verdict.situation is Situation.STALLED and view.snapshot is not None:
        age_seconds = view.values.value(catalog.ENGINE_PROGRESS_AGE)
        if age_seconds is not None:
            began_seconds = view.snapshot.time_seconds - age_seconds
    elif verdict.situation is Situation.STARTING:
        began_seconds = view.values.value(catalog.ENGINE_START)
    if start is None or began_seconds is None:
        return start
    return replace(start, seconds=began_seconds, is_exact=True)


def _list_details(view: View, worst: Verdict) -> Iterator[str]:
    """Yield further details of a situation, as sentences."""
    if worst.situation is Situation.NEIGHBOUR:
        names = []
        for pid in _list_neighbours(view, worst)[:MOST_NEIGHBOURS]:
            name = view.find_process_name(pid)
            names.append(name or f"pid {pid}, whose name is not visible from here")
        if names:
            yield f"On it beside the engine: {'; '.join(names)}."
    if worst.situation is Situation.STARTING and view.history.start_durations_seconds:
        yield _compare_starts(view)


def _compare_starts(view: View) -> str:
    """Return how long earlier starts took, and how long the current start may still take."""
    durations_seconds = view.history.start_durations_seconds
    longest_seconds = max(durations_seconds)
    shortest = format_duration(min(durations_seconds))
    longest = format_duration(longest_seconds)
    is_one_duration = shortest == longest
    sentence = f"Earlier starts took {shortest} to {longest}"
    if is_one_duration:
        sentence = f"Earlier starts took about {longest}"
    began_seconds = view.values.value(catalog.ENGINE_START)
    if began_seconds is None or view.snapshot is None:
        return f"{sentence}."
    left_seconds = longest_seconds - (view.snapshot.time_seconds - began_seconds)
    if left_seconds <= 0:
        return f"{sentence}; this one takes longer."
    time_left = f"about {format_duration(left_seconds)} left"
    if not is_one_duration:
        time_left = f"at most {time_left}"
    return f"{sentence}; {time_left}."


def _list_neighbours(view: View, worst: Verdict) -> list[int]:
    """Return the pids of the other processes on a verdict's GPU."""
    if view.snapshot is None:
        return []
    engine_pids = {process.pid for process in view.snapshot.engine_processes}
    neighbour_pids = []
    for gpu in view.snapshot.owned_gpus:
        if gpu.reading.display_name != worst.subject:
            continue
        known_pids = engine_pids | {leftover.pid for leftover in gpu.leftovers}
        pids = [process.pid for process in gpu.reading.processes or ()]
        neighbour_pids += [pid for pid in pids if pid not in known_pids]
    return neighbour_pids


NEIGHBOUR_ALERT: Final = "HeadroomNeighbourGrowing"
"""The alert for memory held by other processes."""

MOST_NEIGHBOURS: Final = 5
"""The number of other processes on a GPU that the page names (our choice)."""


NO_INCIDENT_ADVICE: Final = (
    "Read the engine's log. To keep an incident of each exit, set HEADROOM_STATE_DIR."
)
"""What to do after an exit without an incident on disk."""

NEVER_SEEN_ADVICE: Final = "Start the engine, or correct HEADROOM_ENGINE_URL."
"""What to do if no engine has ever been seen."""

UNJUDGED_ADVICE: Final = "Nothing yet: a leak shows only after some minutes of load."
"""What to do if nothing is wrong, but there is no verdict on leaks yet."""

URGENT_ADVICE: Final = (
    "Restart it now: move its traffic away first if there is time. Keep the figures for a bug"
    " report."
)
"""What to do about a leak that may fill up memory within the hour."""

NO_BURST_ADVICE: Final = (
    "Now: reduce the load, or restart with a lower --gpu-memory-utilization. The next burst may end"
    " the engine."
)
"""What to do if an over-budget engine leaves too little memory for a burst."""

LOGIN_ADVICE: Final = (
    "Give the sidecar a login that may read the engine's page: vllm-headroom doctor prints the line"
    " to add."
)
"""What to do if the engine's server denies access to its page. The login is missing or wrong."""

EXIT_SITUATIONS: Final = frozenset({Situation.CRASH_LOOP, Situation.DOWN})
"""Situations that begin with an exit, which is explained by the newest incident."""

COMMAND_BY_SITUATION: Final = {
    Situation.LEAKING: "vllm-headroom advise",
    Situation.GROWING: "vllm-headroom advise",
    Situation.HOST_LEAK: "vllm-headroom advise",
    Situation.LOW_MEMORY: "vllm-headroom advise",
    Situation.OVER_BUDGET: "vllm-headroom advise",
    Situation.STALLED: "vllm-headroom smoke",
    Situation.BLIND: "vllm-headroom doctor",
}
"""The command that explains a situation in more detail. The command runs in the sidecar's
container.
"""

PURPOSES: Final = {
    "advise": "prints the cause and which option of vLLM to change; it changes nothing",
    "doctor": "prints what cannot be read, and the line to add",
    "postmortem": "prints the cause and its evidence",
    "smoke": "sends one short request, and prints whether it is answered",
}
"""What each of these commands does, shown to people before they run it."""


def _was_never_seen(view: View, worst: Verdict) -> bool:
    """Return whether the engine is reported as down because no engine has ever been seen."""
    status = view.engine_status
    return worst.situation is Situation.DOWN and status is not None and not status.was_seen


def _advise_after_exit(view: View, worst: Verdict) -> str:
    if view.last_incident is None:
        return NO_INCIDENT_ADVICE
    return worst.situation.action


def _advise_on_growth(view: View, worst: Verdict) -> str:
    if worst.level is not Level.ALARM:
        return worst.situation.action
    earliest_seconds, likely_seconds = _find_time_left(view, worst.situation)
    if earliest_seconds is None:
        earliest_seconds = likely_seconds
    if earliest_seconds is not None and earliest_seconds < HOUR_SECONDS:
        return URGENT_ADVICE
    return worst.situation.action


def _advise_on_excess(_view: View, worst: Verdict) -> str:
    if worst.level is Level.ALARM:
        return NO_BURST_ADVICE
    return worst.situation.action


def _advise_on_blindness(view: View, worst: Verdict) -> str:
    if worst.subject == "engine" and _is_login_missing(view):
        return LOGIN_ADVICE
    return worst.situation.action


def _is_login_missing(view: View) -> bool:
    """Return whether the engine's server responds, but denies access to its metrics page."""
    if view.snapshot is None or not isinstance(view.snapshot.engines, Failure):
        return False
    return view.snapshot.engines.reason is Reason.UNAUTHORIZED


def _advise_on_neighbours(view: View, worst: Verdict) -> str:
    """Return what to do about other processes on a GPU.

    A single process is named if possible.
    """
    pids = _list_neighbours(view, worst)
    # Memory left behind by an exited engine does not belong to a neighbour.
    if worst.alert != NEIGHBOUR_ALERT or len(pids) != 1:
        return worst.situation.action
    name = view.find_process_name(pids[0])
    if name is None:
        return worst.situation.action
    return f"Move {name} away if it was not planned."


def _advise_while_unjudged(_view: View, _worst: Verdict) -> str:
    return UNJUDGED_ADVICE


ADVISERS: Final[Mapping[Situation, Callable[[View, Verdict], str]]] = {
    Situation.CRASH_LOOP: _advise_after_exit,
    Situation.DOWN: _advise_after_exit,
    Situation.LEAKING: _advise_on_growth,
    Situation.HOST_LEAK: _advise_on_growth,
    Situation.GROWING: _advise_on_growth,
    Situation.OVER_BUDGET: _advise_on_excess,
    Situation.NEIGHBOUR: _advise_on_neighbours,
    Situation.BLIND: _advise_on_blindness,
    Situation.HEALTHY: _advise_while_unjudged,
}
"""The functions that find the advice, by situation. In all other situations, the advice is the
situation's action.
"""


def find_advice(view: View, worst: Verdict) -> str:
    """Return what to do first in a situation, referring to this page."""
    if _was_never_seen(view, worst):
        return NEVER_SEEN_ADVICE
    adviser = ADVISERS.get(worst.situation)
    if adviser is None:
        return worst.situation.action
    return adviser(view, worst)


def _find_command(view: View, worst: Verdict) -> str | None:
    """Return the command that explains a situation in more detail, or None."""
    if _was_never_seen(view, worst):
        return COMMAND_BY_SITUATION[Situation.BLIND]
    if worst.situation in EXIT_SITUATIONS and view.last_incident is not None:
        return view.last_incident.command
    return COMMAND_BY_SITUATION.get(worst.situation)


def _render_explained(view: View, worst: Verdict) -> str:
    """Return the command that explains a situation, with its purpose, or ""."""
    command = _find_command(view, worst)
    if command is None:
        return ""
    purpose = PURPOSES[command.split()[1]]
    return (
        f"<p class=run>{_render_command(command)}"
        f"<small>Run in the sidecar's container, it {purpose}.</small></p>"
    )


def _render_command(command: str | None) -> str:
    """Return a command with a button that copies it, or "" for None.

    The script shows the button only if the browser supports copying.
    """
    if command is None:
        return ""
    return f" <code>{escape_text(command)}</code> <button class=copy hidden>Copy</button>"


TIME_LEFT_METRICS: Final = {
    Situation.LEAKING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.GROWING: (catalog.TIME_TO_OOM, catalog.TIME_TO_OOM_LOWER),
    Situation.HOST_LEAK: (catalog.HOST_TIME_TO_OOM, catalog.HOST_TIME_TO_OOM_LOWER),
}
"""The metrics for the time until memory runs out and for the lower bound of this time. The key is
the situation in which memory grows.
"""

WITHOUT_ROOM: Final = frozenset(
    {
        Situation.DOWN,
        Situation.BLIND,
        Situation.STARTING,
        Situation.STRANDED,
        Situation.FILLING,
    }
)
"""Situations in which the GPU's free memory does not matter. The page does not emphasise it."""


def find_key_figure(view: View, worst: Verdict) -> tuple[str, str]:
    """Return the most important number in a situation, and its caption; both may be empty.

    For a situation without a number, the free memory of the fullest GPU is returned. In the
    situations WITHOUT_ROOM, the number and caption are empty instead.
    """
    number = NUMBERS.get(worst.situation, find_no_number)(view, worst)
    if number is not None:
        return number
    if worst.situation in WITHOUT_ROOM:
        # In these situations, free memory would distract from the problem.
        return "", ""
    return _find_free_memory(view.values)


KeyFigure = tuple[str, str]
"""A number with its unit, and its caption."""


def find_no_number(_view: View, _worst: Verdict) -> KeyFigure | None:
    """Return None, because the situation has no key figure."""
    return None


def _count_exits(view: View, _worst: Verdict) -> KeyFigure | None:
    status = view.engine_status
    if status is None:
        return None
    return f"{status.recent_exits} exits", "in the last 90 minutes"


def _measure_time_left(view: View, worst: Verdict) -> KeyFigure | None:
    earliest_seconds, likely_seconds = _find_time_left(view, worst.situation)
    if likely_seconds is None:
        return None
    caption = "until out of memory"
    gpu_count = len(_list_alike_gpus(view, worst))
    if gpu_count > 1:
        caption += f" on the first of {gpu_count} GPUs"
    likely = format_duration(likely_seconds)
    if earliest_seconds is None:
        return f"about {likely}", caption
    earliest = format_duration(earliest_seconds)
    if earliest == likely:
        return likely, caption
    return f"{earliest} to {likely}", f"{caption}: earliest to likely"


def _find_time_left(view: View, situation: Situation) -> tuple[float | None, float | None]:
    """Return the earliest and the likely time remaining until memory runs out.

    Each time is the minimum over all GPUs, or None if unknown.
    """
    likely_time_left, earliest_time_left = TIME_LEFT_METRICS[situation]
    earliest_seconds = min(view.values.find_all(earliest_time_left).values(), default=None)
    likely_seconds = min(view.values.find_all(likely_time_left).values(), default=None)
    return earliest_seconds, likely_seconds


def _measure_stall(view: View, _worst: Verdict) -> KeyFigure | None:
    age_seconds = view.values.value(catalog.ENGINE_PROGRESS_AGE)
    if age_seconds is None:
        return None
    return format_duration(age_seconds), "without progress"


def _measure_start(view: View, _worst: Verdict) -> KeyFigure | None:
    started_at_seconds = view.values.value(catalog.ENGINE_START)
    if started_at_seconds is None or view.snapshot is None:
        return None
    age_seconds = view.snapshot.time_seconds - started_at_seconds
    return format_duration(age_seconds), "since it was started"


def _measure_excess(view: View, _worst: Verdict) -> KeyFigure | None:
    status = view.engine_status
    if status is None or not status.excesses:
        return None
    excess = max((excess for _, excess in status.excesses), key=lambda excess: excess.excess_bytes)
    budget = format_size(excess.budget_bytes)
    return format_size(excess.excess_bytes), f"more than its budget of {budget}"


def _measure_neighbours(view: View, worst: Verdict) -> KeyFigure | None:
    # Memory left behind by an exited engine is not held by others.
    if worst.alert != NEIGHBOUR_ALERT:
        return None
    holdings = view.values.find_all(catalog.GPU_MEMORY_HELD).items()
    sizes_bytes = [size_bytes for (*_, holder), size_bytes in holdings if holder == "other"]
    if not sizes_bytes:
        return None
    free, of_total = _find_free_memory(view.values)
    return format_size(max(sizes_bytes)), f"held by others; {free} {of_total}"


def _measure_stranded(view: View, _worst: Verdict) -> KeyFigure | None:
    stranded_ratios = view.values.find_all(catalog.ENGINE_KV_STRANDED).values()
    if not stranded_ratios:
        return None
    return f"{100 * max(stranded_ratios):.0f} %", "of the KV cache"


def _measure_bound(view: View, _worst: Verdict) -> KeyFigure | None:
    bounds_bytes = view.values.find_all(catalog.LEAK_BOUND).values()
    if not bounds_bytes:
        return None
    caption = "more at most until it is full, then it stays: nothing to do"
    return format_size(max(bounds_bytes)), caption


def _measure_since(view: View, worst: Verdict) -> KeyFigure | None:
    """Return how long a verdict has held, or None if unknown."""
    start = view.find_start(worst)
    if start is None or view.snapshot is None:
        return None
    elapsed_seconds = view.snapshot.time_seconds - start.seconds
    duration = format_duration(max(0.0, elapsed_seconds))
    if not start.is_exact:
        duration = f"at least {duration}"
    if _was_never_seen(view, worst):
        return duration, "without an engine"
    if worst.situation is Situation.DOWN:
        return duration, "down"
    return duration, "without a reading"


NUMBERS: Final[Mapping[Situation, Callable[[View, Verdict], KeyFigure | None]]] = {
    Situation.CRASH_LOOP: _count_exits,
    Situation.DOWN: _measure_since,
    Situation.STALLED: _measure_stall,
    Situation.LEAKING: _measure_time_left,
    Situation.HOST_LEAK: _measure_time_left,
    Situation.GROWING: _measure_time_left,
    Situation.OVER_BUDGET: _measure_excess,
    Situation.NEIGHBOUR: _measure_neighbours,
    Situation.STRANDED: _measure_stranded,
    Situation.BLIND: _measure_since,
    Situation.FILLING: _measure_bound,
    Situation.STARTING: _measure_start,
}
"""The functions that find the key figure, by situation. Each function returns None if the figure is
unknown.
"""


def _find_free_memory(values: Values) -> tuple[str, str]:
    """Return the fullest GPU's free memory and a caption.

    The number and the caption are "" if the free memory is unknown.
    """
    free_bytes = values.find_all(catalog.GPU_MEMORY_FREE)
    if not free_bytes:
        return "", ""
    fullest_gpu = min(free_bytes, key=lambda labels: free_bytes[labels])
    caption = "free"
    total_bytes = values.value(catalog.GPU_MEMORY_TOTAL, *fullest_gpu)
    if total_bytes is not None:
        caption += f" of {format_size(total_bytes)}"
    gpu_index, _ = fullest_gpu
    caption += f" on GPU {gpu_index}"
    if len(free_bytes) > 1:
        caption += ", the fullest"
    return format_size(free_bytes[fullest_gpu]), caption


def _render_verdicts(view: View) -> str:
    """Return the verdicts after the worst one, which is at the top of the page.

    If many GPUs share the worst situation, they are folded into one line. The reader can open that
    line. Healthy GPUs are folded into another line.
    """
    worst, *others = view.shown_verdicts
    contradictions = _find_contradictions(view)
    verdicts = [verdict for verdict in others if verdict not in contradictions]
    verdicts, healthy_line = _fold_gpus(view, verdicts, Situation.HEALTHY)
    verdicts, alike_line = _fold_gpus(view, verdicts, worst.situation)
    return f"{alike_line}{_render_list(view, verdicts)}{healthy_line}"


def _find_contradictions(view: View) -> list[Verdict]:
    """Return the engine's verdict HEALTHY, if it also has an alarm or warning.

    In a crash loop, the engine serves for a while between exits. A green line about the serving
    engine would contradict the alarm.
    """
    of_engine = [verdict for verdict in view.shown_verdicts if verdict.subject == "engine"]
    if not any(verdict.level in (Level.ALARM, Level.WARNING) for verdict in of_engine):
        return []
    return [verdict for verdict in of_engine if verdict.situation is Situation.HEALTHY]


def _fold_gpus(
    view: View, verdicts: list[Verdict], situation: Situation
) -> tuple[list[Verdict], str]:
    """Return the verdicts that are not folded, and the line for the folded GPUs.

    The GPUs in `situation` are folded. If fewer than FOLDED_GPUS GPUs are in `situation`, nothing
    is folded and the line is empty.
    """
    folded = [
        verdict
        for verdict in verdicts
        if verdict.situation is situation and verdict.subject.startswith("GPU ")
    ]
    if len(folded) < FOLDED_GPUS:
        return verdicts, ""
    # It is faster to read a few lines than to unfold them.
    unfolded = [verdict for verdict in verdicts if verdict not in folded]
    summary = _summarize_gpus(view, folded)
    level = folded[0].level
    line = f"<details class='alike {level}'><summary>{summary}</summary>"
    line += f"{_render_list(view, folded)}</details>"
    return unfolded, line


def _render_list(view: View, verdicts: list[Verdict]) -> str:
    """Return the verdicts as a list, or "" if there are none."""
    if not verdicts:
        return ""
    lines = "".join(_render_sentence(view, verdict) for verdict in verdicts)
    return f"<ul class=verdicts>{lines}</ul>"


def _summarize_gpus(view: View, verdicts: list[Verdict]) -> str:
    """Return one line that summarises GPUs in the same situation."""
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
    return render_text(summary)


def _find_lowest_free(view: View, subjects: set[str]) -> int | None:
    """Return the lowest free memory among the GPUs of these verdicts, or None if unknown."""
    if view.snapshot is None:
        return None
    gpus = [gpu for gpu in view.snapshot.owned_gpus if gpu.reading.display_name in subjects]
    memories = [gpu.reading.memory for gpu in gpus if gpu.reading.memory is not None]
    return min((memory.free_bytes for memory in memories), default=None)


def _render_sentence(view: View, verdict: Verdict) -> str:
    level_name = f"<b>{LEVEL_NAMES[verdict.level]}</b>"
    sentence = f"{render_text(verdict.sentence)}{_render_runbook(view, verdict)}"
    return f"<li class={verdict.level}>{level_name} {sentence}</li>"


def _render_runbook(view: View, verdict: Verdict) -> str:
    """Return a link to the runbook of a verdict's alert.

    Returns "" if there is no alert or runbook.
    """
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
            text = render_text(event.text)
            yield f"<li>{level_name} {time} {text}</li>"
        yield "</ul>"


def _render_figures(view: View, snapshot: Snapshot, query: str) -> Iterator[str]:
    """Yield the links that select how much of the past is shown, and the figures.

    Nothing is yielded if there are no figures.
    """
    options = dict(parse_qsl(query))
    # Other query parameters, such as `engine`, are kept in the links.
    chosen_range = options.pop(RANGE_QUERY, "")
    figures = list(draw_figures(view, snapshot, RANGES.get(chosen_range)))
    if not figures:
        return
    # Unlike buttons, links work without scripts.
    links = []
    for name in ("", *RANGES):
        query_fields = dict(options)
        if name:
            query_fields[RANGE_QUERY] = name
        address = escape_text(urlencode(query_fields))
        current = ""
        if name == chosen_range:
            current = " aria-current=true"
        links.append(f'<a href="/?{address}"{current}>{name or "auto"}</a>')
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
