"""The page for people."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from tests.samples import engine, failure, gpu, page, snapshot
from tests.unit.expose.views import NOW, day, host_day, show, view
from vllm_headroom import catalog
from vllm_headroom.expose.assets import SCRIPT
from vllm_headroom.expose.figures import EDGE_PERCENT
from vllm_headroom.expose.page import render_page, respond_html
from vllm_headroom.expose.times import render_time
from vllm_headroom.expose.view import History, HistoryEvent, LastIncident, View
from vllm_headroom.model import (
    EnginePod,
    EngineStatus,
    GpuProcess,
    ProbedProcess,
    ProbeReadings,
    Sample,
    Values,
    Verdict,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineState, Level, Reason, Role, Situation, Source

GPU = ("0", "GPU-a")
EMPTY = View(version="1.2.3", interval_seconds=5.0, history=History())


def test_before_the_first_sample_the_page_says_so() -> None:
    shown = show(EMPTY)

    assert "No sample has been published yet." in shown
    assert "<title>NOT KNOWN: sidecar blind" in shown


def test_a_gpu_of_which_nothing_is_known_yet_is_not_called_healthy() -> None:
    serving = EngineStatus(state=EngineState.SERVING)
    young_snapshot = replace(snapshot(engines=page(engine()), gpus=(gpu(),)), time_seconds=NOW, engine_status=serving)

    shown = show(view([Sample(catalog.LEAK_STATE, (*GPU, "warming_up"), 1.0)], at=young_snapshot))

    assert "<h1>NOT KNOWN: whether GPU 0 leaks</h1>" in shown
    assert "too early to tell whether it leaks" in shown


def test_what_is_known_is_shown_and_what_is_not_is_called_so() -> None:
    shown = show(
        view(
            [
                Sample(catalog.GPU_INFO, (*GPU, "H100", "process"), 1.0),
                Sample(catalog.GPU_MEMORY_FREE, GPU, 3.0 * 2**30),
            ]
        )
    )

    assert '<td data-t="free">3.00 GiB</td>' in shown
    assert '<td data-t="total">not known</td>' in shown


def test_peaks_of_steps_are_a_table_where_the_probe_measures_them() -> None:
    shown = show(
        view(
            [
                Sample(catalog.ENGINE_PEAK_ROOM, GPU, 4.0 * GIB),
                Sample(catalog.ENGINE_PEAK, (*GPU, "prompt_logprobs"), 1.0 * GIB),
                Sample(catalog.ENGINE_PEAK_RATIO, (*GPU, "prompt_logprobs"), 0.25),
                Sample(catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS, GPU, 12345.0),
            ]
        )
    )

    assert ">prompt logprobs, GPU 0<" in shown
    assert '<td data-t="of the room">25.0%</td>' in shown
    assert '<td data-t="largest that fits">12,345 tokens</td>' in shown
    assert "Peaks of steps" not in show(view([]))


def test_host_memory_has_a_figure_with_its_way_to_zero_and_a_table_of_its_processes() -> None:
    shown = show(host_day())

    assert "<b>Host memory</b>: 4 GiB of 64 GiB free</figcaption>" in shown
    assert 'class="ahead"' in shown
    rows = re.findall(r"<th scope=row>(\w+)</th>(.*?)</tr>", shown)
    assert [(role, re.findall(r"<td data-t=[^>]*>(.*?)</td>", cells)) for role, cells in rows[:2]] == [
        ("worker", ["57.00 GiB", "3.00 GiB", "leaking", "60 GiB"]),
        ("api_server", ["1.00 GiB", "not known", "not known", ""]),
    ]
    assert "Host memory by process" not in show(day())


@pytest.mark.parametrize("past", ["1h", "6h", "24h", "7d"])
def test_a_time_of_an_axis_stands_under_its_line_or_is_left_out(past: str) -> None:
    texts = re.findall(r'<text x="([\d.]+)%" y="14" text-anchor="(\w+)"', show(day(), f"range={past}"))

    assert texts
    assert {anchor for _, anchor in texts} == {"middle"}
    assert all(EDGE_PERCENT <= float(percent) <= 100 - EDGE_PERCENT for percent, _ in texts)


def test_growth_that_a_pool_explains_has_no_line_to_zero() -> None:
    filling = Verdict(
        subject="host memory",
        level=Level.GOOD,
        sentence="Host memory of worker grows as its configured pools do: filling, 5 GiB of 24 GiB.",
        situation=Situation.FILLING,
    )

    bound = Sample(catalog.LEAK_BOUND, ("", "", "worker"), 19.0 * GIB)
    shown = show(replace(host_day(), verdicts=(filling,), values=Values([bound])))

    assert 'class="ahead"' not in shown
    assert "<b>19 GiB <small>more at most until it is full, then it stays: nothing to do" in shown


def test_host_memory_that_torch_has_pinned_is_a_column_where_the_probe_says_so() -> None:
    worker = ProbedProcess(
        pid=7,
        started_at_seconds=1.0,
        written_at_seconds=2.0,
        interval_seconds=5.0,
        role=Role.WORKER,
        pinned_bytes=3 * 2**30,
    )
    unknown = replace(worker, pid=9, role=Role.API_SERVER, pinned_bytes=None)
    shown_day = host_day()
    assert shown_day.snapshot is not None
    probed_snapshot = replace(
        shown_day.snapshot, probe=ProbeReadings(present=(worker, replace(worker, pid=8), unknown))
    )

    shown = show(replace(shown_day, snapshot=probed_snapshot))

    assert re.findall(r'<td data-t="pinned by torch">(.*?)</td>', shown) == ["6.00 GiB", "not known"]
    assert "pinned by torch" not in show(shown_day)


def test_a_failed_source_says_its_cause() -> None:
    samples = (
        Sample(catalog.SOURCE_UP, ("engine",), 0.0),
        Sample(catalog.SOURCE_READ_SECONDS, ("engine",), 0.0125),
        Sample(catalog.SOURCE_LAST_SUCCESS, ("engine",), NOW - 60),
    )
    silent = replace(snapshot(engines=failure(Source.ENGINE)), time_seconds=NOW)

    shown = show(view(samples, at=silent))

    assert "<b class=alarm>failed</b>" in shown
    assert [cell in shown for cell in (">12.5 ms</td>", ">1 min 0 s before</td>", ">unreachable: it failed</td>")] == [
        True
    ] * 3


def read_plots(shown: str) -> list[tuple[float, float]]:
    """Return the times at which each plot begins and ends."""
    return [(float(begin), float(end)) for begin, end in re.findall(r'data-begin="(\d+)" data-end="(\d+)"', shown)]


@pytest.mark.parametrize("leaking", [frozenset(), frozenset({0})])
def test_free_memory_and_load_have_the_same_time_axis(leaking: frozenset[int]) -> None:
    memory, load = read_plots(show(day(leaking=leaking)))

    assert memory == load
    assert (memory[1] > NOW) == bool(leaking)


def test_an_even_leak_and_its_forecast_are_one_straight_line() -> None:
    shown = show(day(leaking=frozenset({0}), minutes=601))
    past = re.search(r'class="line" d="M([\d.]+) ([\d.]+)L.*?([\d.]+) ([\d.]+)"', shown)
    ahead = re.search(r'class="ahead" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', shown)
    assert past is not None
    assert ahead is not None
    first_x, first_y, now_x, now_y = map(float, past.groups())
    start_x, start_y, end_x, end_y = map(float, ahead.groups())

    assert (start_x, start_y) == (now_x, now_y)
    # The forecast of this day ends in 4 hours; its free memory would last for 17.8 hours more at the
    # slope of the past, so the forecast is steeper by that factor and by no other.
    free_bytes = 10e9 - 6e6 * 600
    expected_factor = free_bytes / (6e6 * 60) / 4
    factor = (end_y - start_y) / (end_x - start_x) / ((now_y - first_y) / (now_x - first_x))
    assert factor == pytest.approx(expected_factor, rel=0.01)


@pytest.mark.parametrize(("minutes", "least_share"), [(24 * 60, 0.2), (60, 0.5)])
def test_past_and_forecast_both_take_a_part_that_can_be_read(minutes: int, least_share: float) -> None:
    begin, end = read_plots(show(day(leaking=frozenset({0}), minutes=minutes)))[0]

    future_share = (end - NOW) / (end - begin)

    assert least_share <= future_share <= 2 / 3 + 0.01


def test_a_forecast_beyond_the_picture_is_said_to_be_there() -> None:
    shown = show(day(leaking=frozenset({0}), minutes=30))

    assert "; beyond this picture." in shown
    assert "; beyond this picture." not in show(day(leaking=frozenset({0})))


@pytest.mark.parametrize(("query", "hours"), [("range=1h", 1), ("range=6h", 6), ("range=24h", 24), ("range=7d", 168)])
def test_a_reader_chooses_how_much_of_the_past_is_shown(query: str, hours: int) -> None:
    shown = show(day(), query)

    frames = re.findall(r'data-begin="(\d+)" data-end="(\d+)"', shown)
    assert {int(end) - int(begin) for begin, end in frames} == {hours * 3600}
    assert f'<a href="/?{query}" aria-current=true>{query[6:]}</a>' in shown


def test_the_choice_of_the_past_keeps_what_else_was_chosen_and_writes_no_html() -> None:
    shown = show(day(), "engine=ml%2Fa%22%3E%3Cb%3E&range=9d")

    assert '<a href="/?engine=ml%2Fa%22%3E%3Cb%3E&amp;range=6h">6h</a>' in shown
    assert "><b>&" not in shown
    assert "aria-current" not in shown.partition("<body")[2].partition("<script>")[0]


def test_the_legend_names_only_what_is_drawn() -> None:
    healthy, leaking = show(day()), show(day(leaking=frozenset({0})))

    assert ("<i class=to>" in healthy, "<i class=at>" in healthy) == (False, False)
    assert ("<i class=to>" in leaking, "<i class=now>" in leaking) == (True, True)


def test_a_column_without_a_value_is_not_shown() -> None:
    samples = (Sample(catalog.SOURCE_UP, ("engine",), 1.0), Sample(catalog.SOURCE_READ_SECONDS, ("engine",), 0.00001))

    shown = show(view(samples))

    assert "cause and cure" not in shown
    assert ">under 0.1 ms</td>" in shown


@pytest.mark.parametrize("file", [None, "/state/incidents/a.jsonl"])
def test_an_exit_leads_to_its_incident_or_to_how_to_keep_one(file: str | None) -> None:
    looping = replace(snapshot(), engine_status=EngineStatus(state=EngineState.STARTING, recent_exits=4))
    incident = None
    if file is not None:
        incident = LastIncident(seconds=NOW, kind="ended", reason="gone", sentence=None, file=file)

    shown = show(view(at=looping, last_incident=incident))
    hero = shown[shown.index("<section class='hero") : shown.index("</section>")]

    assert ("HEADROOM_STATE_DIR" in hero) == (file is None)
    assert ("<code>vllm-headroom postmortem /state/incidents/a.jsonl</code>" in hero) == (file is not None)


def test_the_leak_is_the_first_thing_that_is_read() -> None:
    shown = show(day(gpus=2, leaking=frozenset({1})))

    assert shown.startswith("<!doctype html>")
    assert "<title>ALARM: GPU 1 leaking" in shown
    hero = shown[shown.index("<section class='hero alarm'>") : shown.index("</section>")]
    assert "<h1>ALARM: GPU 1 leaking</h1>" in hero
    assert "<b>2 h 0 min to 4 h 0 min <small>until out of memory: earliest to likely</small></b>" in hero
    assert "<p>Plan a restart before the earliest time" in hero
    assert shown.index("</section>") < shown.index("<li class=good>")
    assert shown.index("<b>GPU 1</b>") < shown.index("<b>GPU 0</b>")


def test_a_healthy_engine_shows_the_least_free_memory_and_nothing_to_do() -> None:
    shown = show(day(gpus=2))

    hero = shown[shown.index("<section class='hero good'>") : shown.index("</section>")]
    assert "free of 80 GiB on GPU 0, the fullest</small>" in hero
    assert Situation.HEALTHY.action not in hero


def test_a_start_shows_how_long_it_takes_so_far_and_not_the_empty_card() -> None:
    starting = replace(
        snapshot(engines=failure(Source.ENGINE), gpus=(gpu(),)),
        time_seconds=NOW,
        engine_status=EngineStatus(state=EngineState.STARTING),
    )
    free = Sample(catalog.GPU_MEMORY_FREE, GPU, 70.0 * GIB)

    assert "<b>10 min 0 s <small>since it was started</small></b>" in show(
        view([free, Sample(catalog.ENGINE_START, (), NOW - 600)], at=starting)
    )
    assert "<small>free" not in show(view([free], at=starting))


def test_a_crash_loop_shows_how_often_the_engine_exited() -> None:
    looping = replace(snapshot(), engine_status=EngineStatus(state=EngineState.STARTING, recent_exits=4))

    shown = show(view(at=looping))

    assert "<b>4 exits <small>in the last 90 minutes</small></b>" in shown
    assert "<h1>ALARM: engine crash loop, and starting again</h1>" in shown


def test_a_trouble_shows_since_when_it_holds_and_how_big_it_is() -> None:
    neighbours = (GpuProcess(pid=4711, used_bytes=9 * GIB), GpuProcess(pid=4712, used_bytes=GIB))
    used = gpu(used=70 * GIB, total=80 * GIB, engine=60 * GIB, other=10 * GIB, processes=neighbours)
    at, history = replace(snapshot(gpus=(used,)), time_seconds=NOW - 600), History()
    samples = [
        Sample(catalog.GPU_MEMORY_HELD, (*GPU, "other"), 10.0 * GIB),
        Sample(catalog.GPU_MEMORY_FREE, GPU, 10.0 * GIB),
    ]
    history.step(replace(at, time_seconds=NOW - 700), (), None)
    history.step(at, view(samples, at=at).verdicts, None)
    shown = show(
        view(
            samples,
            at=replace(at, time_seconds=NOW),
            history=history,
            find_process_name=lambda pid: "python3 train.py (pid 4711)" if pid == 4711 else None,
        )
    )

    assert "WARNING: GPU 0 used by other processes <small>for 10 min 0 s, since <time" in shown
    assert "<b>10 GiB <small>held by others; 10 GiB free" in shown
    named = "python3 train.py (pid 4711); pid 4712, whose name is not visible from here."
    assert f"On it beside the engine: {named}" in shown


def test_a_neighbour_that_is_named_is_not_to_be_found() -> None:
    other_gpu_process = GpuProcess(pid=4711, used_bytes=10 * GIB)
    used = gpu(used=70 * GIB, total=80 * GIB, engine=60 * GIB, other=10 * GIB, processes=(other_gpu_process,))

    shown = show(
        view(
            [Sample(catalog.GPU_MEMORY_HELD, (*GPU, "other"), 10.0 * GIB)],
            at=replace(snapshot(gpus=(used,)), time_seconds=NOW),
            find_process_name=lambda _: "train.py (pid 4711, pod research/train-0)",
        )
    )

    assert "<p>Move train.py (pid 4711, pod research/train-0) away if it was not planned." in shown


@pytest.mark.parametrize(
    ("state", "sample", "began"),
    [
        (EngineState.STARTING, Sample(catalog.ENGINE_START, (), NOW - 600), NOW - 600),
        (EngineState.STALLED, Sample(catalog.ENGINE_PROGRESS_AGE, (), 125.0), NOW - 125),
        (EngineState.UNKNOWN, Sample(catalog.ENGINE_RUNNING, ("m", "0"), 0.0), NOW - 60),
    ],
)
def test_a_duration_has_the_time_at_which_it_began(state: EngineState, sample: Sample, began: float) -> None:
    at = replace(snapshot(gpus=(gpu(),)), time_seconds=NOW - 60, engine_status=EngineStatus(state=state))
    history = History()
    history.step(replace(at, time_seconds=NOW - 120), (), None)
    history.step(at, view([sample], at=at).verdicts, None)

    shown = show(view([sample], at=replace(at, time_seconds=NOW), history=history))

    headline = shown[shown.index("<h1>") : shown.index("</h1>")]
    assert f"<small>since {render_time(began)}</small>" in headline


def test_a_crash_loop_has_the_time_at_which_it_began_and_no_line_that_all_is_well() -> None:
    looping = replace(
        snapshot(engines=page(engine()), gpus=(gpu(),)),
        time_seconds=NOW - 60,
        engine_status=EngineStatus(state=EngineState.SERVING, recent_exits=4),
    )
    history = History()
    history.step(replace(looping, time_seconds=NOW - 120), (), None)
    history.step(looping, view(at=looping).verdicts, None)

    shown = show(view(at=replace(looping, time_seconds=NOW), history=history))

    assert "<h1>ALARM: engine crash loop, and serving now <small>for 1 min 0 s, since <time" in shown
    assert "The engine serves" not in shown.partition("<h2>")[0]


def test_a_burst_that_does_not_fit_does_not_wait_for_a_quiet_hour() -> None:
    alarm = Verdict(
        subject="GPU 0", level=Level.ALARM, sentence="GPU 0: a burst takes more.", situation=Situation.OVER_BUDGET
    )
    warning = replace(alarm, level=Level.WARNING)

    assert "<p>Now: reduce the load, or restart with a lower" in show(replace(day(), verdicts=(alarm,)))
    assert "at the next quiet hour" in show(replace(day(), verdicts=(warning,)))


def test_a_page_that_asks_for_a_login_leads_to_the_login() -> None:
    refused = replace(failure(Source.ENGINE), reason=Reason.UNAUTHORIZED)
    blind = replace(
        snapshot(engines=refused, gpus=(gpu(),)),
        time_seconds=NOW,
        engine_status=EngineStatus(state=EngineState.UNKNOWN),
    )

    shown = show(view(at=blind))

    assert "answers, but asks for a login: whether the engine makes progress is not known" in shown
    assert "<p>Give the sidecar a login that may read the engine" in shown


def test_an_engine_that_was_never_seen_leads_to_doctor() -> None:
    unseen = replace(
        snapshot(engines=failure(Source.ENGINE), gpus=(gpu(),)),
        engine_status=EngineStatus(state=EngineState.DOWN, was_seen=False),
    )

    shown = show(view(at=unseen))
    hero = shown[shown.index("<section class='hero") : shown.index("</section>")]

    assert "<h1>NOT KNOWN: engine down</h1>" in hero
    assert "it failed" in hero
    assert "Start the engine, or correct HEADROOM_ENGINE_URL." in hero
    assert "<code>vllm-headroom doctor</code>" in hero


def test_a_start_says_how_long_the_starts_before_took() -> None:
    starting = replace(
        snapshot(engines=failure(Source.ENGINE), gpus=(gpu(),)),
        time_seconds=NOW,
        engine_status=EngineStatus(state=EngineState.STARTING),
    )
    history = History()
    history.start_durations_seconds = (65.0, 600.0)

    began = Sample(catalog.ENGINE_START, (), NOW - 300)
    late = Sample(catalog.ENGINE_START, (), NOW - 700)

    assert "Earlier starts took 1 min 5 s to 10 min 0 s." in show(view(at=starting, history=history))
    assert "10 min 0 s; at most about 5 min 0 s left." in show(view([began], at=starting, history=history))
    assert "10 min 0 s; this one takes longer." in show(view([late], at=starting, history=history))
    history.start_durations_seconds = (600.0,)
    assert "Earlier starts took about 10 min 0 s; about 5 min 0 s left." in show(
        view([began], at=starting, history=history)
    )
    assert "Earlier starts" not in show(view(at=starting))


def test_a_leak_that_leaves_less_than_an_hour_is_not_planned_for() -> None:
    shown = show(host_day())

    assert "<p>Restart it now: move its traffic away first if there is time." in shown
    assert "Plan a restart" not in shown


def test_no_line_break_cuts_a_duration_or_a_size() -> None:
    leaking = render_page(day(leaking=frozenset({0})))

    assert "2\u00a0h\u00a00\u00a0min to 4\u00a0h\u00a00\u00a0min" in leaking
    assert re.search(r">[^<]*\d [KMG]iB", leaking[leaking.index("<main>") : leaking.index("<nav")]) is None


def test_many_quiet_gpus_are_one_line_that_opens() -> None:
    few, eight_gpus = show(day(gpus=3, leaking=frozenset({1}))), show(day(gpus=8, leaking=frozenset({3})))

    assert "class='alike" not in few
    assert "<summary>7 GPUs quiet, at least 9.31 GiB free on each GPU</summary>" in eight_gpus
    folded = eight_gpus[eight_gpus.index("<details class='alike good'>") : eight_gpus.index("</details>")]
    assert folded.count("<li class=good>") == 7


def test_many_gpus_that_leak_alike_are_one_line_that_names_them_and_opens() -> None:
    shown = show(day(gpus=8, leaking=frozenset(range(8))))

    folded = shown[shown.index("<details class='alike alarm'>") : shown.index("</details>")]
    first_leak = re.search(r"</b><p>GPU (\d) leaks", shown)
    assert first_leak is not None
    other_indices = ", ".join(str(gpu) for gpu in range(8) if str(gpu) != first_leak[1])
    assert "<h1>ALARM: 8 GPUs leaking</h1>" in shown
    assert "until out of memory on the first of 8 GPUs: earliest to likely" in shown
    assert f"<summary><b class=alarm>ALARM</b> 7 more GPUs leaking: {other_indices}</summary>" in folded
    assert folded.count("<li class=alarm>") == 7
    assert shown.index("<details class='alike alarm'>") < shown.index("<ul class=verdicts><li class=good>")


def test_every_situation_has_something_to_do() -> None:
    assert all(situation.action.endswith(".") for situation in Situation)


def test_whose_page_it_is_stands_first() -> None:
    shown = show(replace(day(gpus=2), host="pod-1", engine_url="http://127.0.0.1:8000/metrics"))

    names = shown[shown.index("<header>") : shown.index("</p>")]
    assert "vllm-headroom \N{MIDDLE DOT} pod-1 \N{MIDDLE DOT} http://127.0.0.1:8000/metrics" in names


def test_the_forecast_is_drawn_where_there_is_one() -> None:
    leaking, healthy = show(day(leaking=frozenset({0}))), show(day())

    assert ('class="ahead"' in leaking, 'class="edge"' in leaking) == (True, True)
    assert 'class="ahead"' not in healthy
    assert 'class="zero"' in healthy


def test_the_first_sample_of_all_draws_a_line_across_the_figure() -> None:
    first_view = day(minutes=1, late=20.0)

    path = re.search(r'class="line" d="M([^"]*)"', show(first_view))

    assert path is not None
    assert [point.split()[0] for point in path[1].split("L")] == ["0.0", "1000.0"]


@pytest.mark.parametrize(("free", "top"), [(79.5, "80 GiB"), (10.0, "12 GiB")])
def test_the_axis_ends_at_the_card(free: float, top: str) -> None:
    assert f"<div class=values aria-hidden=true><span>{top}</span>" in show(day(free=free * GIB))


def test_a_loop_that_does_not_turn_is_an_alarm_above_all() -> None:
    shown = show(day(stall_reason="not turned for 40 s"))

    assert "<title>ALARM: sidecar blind" in shown
    assert "The sidecar does not sample: not turned for 40 s" in shown
    assert ("<li class=good>" in shown, "<li class=unknown>" in shown) == (False, True)


def test_an_alarm_marks_the_figure_of_its_gpu_and_no_other() -> None:
    two_gpus = day(gpus=2)
    two_gpus.history.events = (HistoryEvent(seconds=NOW - 3600, level=Level.ALARM, text="GPU 1 leaks."),)

    first_figure, second = show(two_gpus).split("<b>GPU 1</b>")

    assert ('class="mark"' in first_figure, 'class="mark"' in second) == (False, True)


@pytest.mark.parametrize(
    ("runbooks", "link"),
    [
        ("https://wiki/books", "https://wiki/books/HeadroomGpuMemoryLeak"),
        ("https://wiki/{alert}.html", "https://wiki/HeadroomGpuMemoryLeak.html"),
        (None, None),
    ],
)
def test_a_runbook_is_linked_where_it_is_known(runbooks: str | None, link: str | None) -> None:
    matches = re.findall(r'<a href="(https[^"]*)"', show(day(leaking=frozenset({0}), runbooks=runbooks)))

    assert matches == ([] if link is None else [link])


def test_the_parts_of_a_gpu_are_distinguished_wherever_they_are_named() -> None:
    parts = [gpu(index=1, uuid=f"MIG-{part}", used_peak_bytes=900) for part in "xy"]
    at, history = replace(snapshot(gpus=tuple(parts)), time_seconds=NOW), History()
    history.step(at, (), None)
    samples = [Sample(catalog.GPU_INFO, ("1", f"MIG-{part}", "H100 MIG 3g.40gb", "process"), 1.0) for part in "xy"]
    shown = show(view(samples, at=at, history=history))

    for part in "xy":
        assert f"GPU 1 MIG-{part}: whether it leaks is not known" in shown
        assert f"<b>GPU 1 MIG-{part}</b> H100" in shown
        assert f"GPU 1 MIG-{part} H100 MIG 3g.40gb</th>" in shown
        assert ">the engine (by process)</td>" in shown


def test_names_from_outside_cannot_write_html_nor_turn_a_line_about() -> None:
    silent = replace(snapshot(engines=page(engine(model_name="<script>\u202e"))), time_seconds=NOW)

    shown = show(view([Sample(catalog.ENGINE_INFO, ("<script>\u202e", "0", "vllm"), 1.0)], at=silent))

    assert not any(forbidden in shown.replace(f"<script>{SCRIPT}", "") for forbidden in ("<script>", "\u202e"))
    assert r"&lt;script&gt;\x202e / 0" in shown


def test_a_verdict_cannot_write_html() -> None:
    verdict = Verdict(subject="GPU <i>", level=Level.ALARM, sentence="<b>leaks</b> & grows")

    shown = show(replace(view(), verdicts=(verdict,)))

    assert "&lt;b&gt;leaks&lt;/b&gt; &amp; grows" in shown
    assert "GPU &lt;i&gt; " in shown
    assert not any(forbidden in shown for forbidden in ("<b>leaks", "<i>"))


def test_the_last_incident_is_shown_with_what_tells_more() -> None:
    last_incident = LastIncident(
        seconds=1_760_000_000.0,
        kind="ended",
        reason="gone",
        sentence="A crash. (likely)",
        file="/state/<incidents>/a.jsonl",
    )
    page = show(replace(EMPTY, last_incident=last_incident))

    assert "2025-10-09 08:53:20Z</time>: the engine ended. <b>A crash. (likely)</b>" in page
    assert "<code>vllm-headroom postmortem /state/&lt;incidents&gt;/a.jsonl</code>" in page
    assert "Last incident" not in show(EMPTY)


def test_in_a_pod_it_names_the_engines_container_and_its_log() -> None:
    last_incident = LastIncident(seconds=1_760_000_000.0, kind="ended", reason="gone", sentence=None, file="a.jsonl")
    pod = EnginePod(namespace="llm", pod="vllm-0", container="server")
    page = show(replace(EMPTY, last_incident=last_incident, pod=pod, host="vllm-0"))

    assert "<code>kubectl logs --previous -n llm vllm-0 -c server</code> <button class=copy hidden>" in page
    assert "vllm-headroom \N{MIDDLE DOT} llm/vllm-0 \N{MIDDLE DOT} container server" in page


def test_a_notice_is_shown() -> None:
    assert '<p class="notice">simulated &amp; fast</p>' in show(view(notice="simulated & fast"))


@pytest.mark.parametrize("gpus", [1, 8, 16])
def test_a_day_of_many_gpus_is_a_small_page(gpus: int) -> None:
    assert len(show(day(gpus=gpus, leaking=frozenset({0}))).encode()) <= 90_000


def test_every_element_is_closed() -> None:
    class Balance(HTMLParser):
        open: list[str] = []  # noqa: RUF012 - of this one parse

        def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
            if tag not in {"meta", "link"}:
                self.open.append(tag)

        def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
            """Take what closes itself for closed."""

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    parser = Balance()
    parser.feed(show(day(leaking=frozenset({0}))))

    assert parser.open == []


def test_the_page_may_load_nothing_and_runs_one_script() -> None:
    shown = show(day())
    policy = dict(respond_html(shown).headers)["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", shown, re.DOTALL)

    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert 'http-equiv="refresh"' not in shown
    assert re.findall(r'(?:src|href)="(?!/|data:image/svg)', shown) == []
    assert " style=" not in shown
