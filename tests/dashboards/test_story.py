"""The engine's dashboard shows what happened, in the daemon's own output: nothing, a leak, a neighbour, a restart."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, Final

import pytest

from dashboards.source import colours
from dashboards.source.alerts import summaries
from dashboards.source.colours import FIRST_ACTIONS, GONE
from dashboards.source.ranking import shortened
from tests.dashboards.asking import answer, values
from tests.dashboards.cards import SMALL
from tests.dashboards.grafana import Json, Query, every_query, load, panels
from tests.dashboards.store import (
    BARE,
    BEGIN,
    END,
    PEAK_BYTES,
    PEAKS,
    ROOM_BYTES,
    SAFE_PROMPT_TOKENS,
    TARGETS,
    Prometheus,
)
from vllm_headroom.vocabulary import Situation, Work
from vllm_headroom_tools.demo.world import TOTAL_BYTES

ENGINE: Final = load("headroom")
HELD: Final = "What others hold"
LEDGER: Final = "Memory of the fullest GPU, by holder"
INCIDENT: Final = load("headroom-incident")
HERO: Final = "Headroom: free memory of each GPU"
HOUR: Final = 3600
SITUATIONS: Final = {
    "neighbour": "neighbour",
    "engine down": "starting",
    "sidecar down": "sidecar gone",
    "crash": "crash loop",
    "asleep": "asleep",
}
LEAKS: Final = frozenset({"leak", "eight GPUs", "MIG", BARE})
ALIVE: Final = [target for target in TARGETS if not target.endswith("down")]


def query(board: Json, where: str, name: str) -> Query:
    return next(
        panel_query
        for panel_query in every_query(board)
        if panel_query.where == where and name in {"", panel_query.name}
    )


def ask_panel(
    prometheus: Prometheus, target: str, where: str, name: str = "", board: Json = ENGINE
) -> list[dict[str, Any]]:
    """Return what a panel's query gives over a target; without a name its first."""
    return answer(prometheus, query(board, where, name), values(prometheus, board, TARGETS[target].labels))


def read_tile(prometheus: Prometheus, target: str, where: str) -> str:
    """Return what a panel with one number shows: the text that represents the number, or the number."""
    (series,) = ask_panel(prometheus, target, where)
    value = f"{float(series['values'][-1][1]):g}"
    panel = next(panel for panel in panels(ENGINE) if panel["title"] == where)
    texts = (
        mapping["options"] for mapping in panel["fieldConfig"]["defaults"]["mappings"] if mapping["type"] == "value"
    )
    return next((options[value]["text"] for options in texts if value in options), value)


def test_time_is_left_only_where_something_leaks(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for target in ALIVE:
        with subtests.test(target=target):
            tile = read_tile(prometheus, target, "Likely out of memory")

            if target in LEAKS:
                assert HOUR < float(tile) < 24 * HOUR
            else:
                assert tile == ("asleep" if target == "asleep" else "no leak seen")
            assert (read_tile(prometheus, target, "Out of memory at the earliest") == tile) == (target not in LEAKS)


def test_the_first_tile_names_the_situation_and_the_next_what_to_do(
    prometheus: Prometheus, subtests: pytest.Subtests
) -> None:
    for target in TARGETS:
        with subtests.test(target=target):
            situation = "leaking" if target in LEAKS else SITUATIONS.get(target, "healthy")

            (whose,) = ask_panel(prometheus, target, "Situation")

            assert (
                whose["metric"].items() >= {**TARGETS[target].labels, "situation": situation.replace(" ", "_")}.items()
            )
            assert read_tile(prometheus, target, "Situation") == situation
            assert read_tile(prometheus, target, "What to do first") == FIRST_ACTIONS[situation.replace(" ", "_")]


def test_situations_are_those_of_the_sidecar_in_its_order_and_that_it_is_gone() -> None:
    assert [name for name, _ in colours.SITUATIONS if name != GONE] == list(Situation)


def test_engines_are_listed_by_their_situation_the_worst_first(prometheus: Prometheus) -> None:
    fleet = load("headroom-fleet")
    rows = answer(prometheus, query(fleet, "Engines, worst first", "A"), values(prometheus, fleet, {}))
    order = [name for name, _ in colours.SITUATIONS]

    assert len(rows) == len(TARGETS)
    assert all(order.index(row["metric"]["situation"]) == float(row["values"][-1][1]) for row in rows)
    assert [float(row["values"][-1][1]) for row in rows] == sorted(float(row["values"][-1][1]) for row in rows)


def test_the_fleet_shows_the_earliest_time_to_out_of_memory(prometheus: Prometheus) -> None:
    fleet = load("headroom-fleet")
    put_in = values(prometheus, fleet, {})
    (tile,) = answer(prometheus, query(fleet, "Out of memory at the earliest", ""), put_in)
    column = answer(prometheus, query(fleet, "Engines, worst first", "D"), put_in)
    lower_bounds = [float(read_tile(prometheus, target, "Out of memory at the earliest")) for target in sorted(LEAKS)]

    earliest_seconds = float(tile["values"][-1][1])
    assert earliest_seconds == pytest.approx(min(lower_bounds), abs=1)
    assert min(float(row["values"][-1][1]) for row in column) == earliest_seconds


def test_of_engines_those_of_a_chosen_situation_are_listed(prometheus: Prometheus) -> None:
    fleet = load("headroom-fleet")
    put_in = {**values(prometheus, fleet, {}), "situation": "(leaking|sidecar_gone)"}
    rows = answer(prometheus, query(fleet, "Engines, worst first", "A"), put_in)

    assert {row["metric"]["situation"] for row in rows} == {"leaking", "sidecar_gone"}
    assert len(rows) == len(LEAKS) + 1


def test_a_firing_alert_is_listed_with_what_it_means_and_since_when(prometheus: Prometheus) -> None:
    firing = {row["metric"]["alertname"]: row["metric"] for row in ask_panel(prometheus, "leak", "Firing alerts", "A")}
    since = {
        row["metric"]["alertname"]: float(row["values"][-1][1])
        for row in ask_panel(prometheus, "leak", "Firing alerts", "B")
    }

    assert firing["HeadroomGpuMemoryLeak"]["summary"] in summaries()
    assert 1000 * BEGIN < since["HeadroomGpuMemoryGrowing"] < since["HeadroomGpuMemoryLeak"] < 1000 * END


def test_the_summary_of_an_alert_has_no_templates() -> None:
    assert [summary for summary in summaries().values() if "{{" in summary or "  " in summary] == []
    assert summaries()["HeadroomOutOfMemorySoon"] == "A vLLM engine runs out of GPU memory soon: it leaks."


def test_a_panel_names_its_metrics() -> None:
    description = next(panel for panel in panels(ENGINE) if panel["title"] == "Free now")["description"]

    assert description.endswith("\n\nMetrics: `headroom_gpu_memory_free_bytes`.")


def test_the_peaks_are_those_of_the_gpu_with_the_least_room(prometheus: Prometheus) -> None:
    peaks = ask_panel(prometheus, PEAKS, "Peak of a step, by the kind of work", "{{work}}")
    room = ask_panel(prometheus, PEAKS, "Peak of a step, by the kind of work", "room")

    assert {series["metric"]["work"]: float(series["values"][-1][1]) for series in peaks} == {
        work: peak_bytes[1] for work, peak_bytes in PEAK_BYTES.items()
    }
    assert float(room[0]["values"][-1][1]) == ROOM_BYTES[1]


def test_the_ratio_of_a_peak_is_that_of_the_worst_gpu(prometheus: Prometheus) -> None:
    ratios = ask_panel(prometheus, PEAKS, "Peak of a step over its room")

    assert {series["metric"]["work"]: float(series["values"][-1][1]) for series in ratios} == {
        Work.PREFILL: pytest.approx(1 / 3),
        Work.PROMPT_LOGPROBS: pytest.approx(5 / 6),
    }


def test_a_request_fits_where_it_fits_on_every_gpu(prometheus: Prometheus) -> None:
    (safe_tokens,) = ask_panel(prometheus, PEAKS, "Largest request that fits", "prompt tokens")

    assert float(safe_tokens["values"][-1][1]) == SAFE_PROMPT_TOKENS[1]


def test_a_long_name_keeps_its_end(prometheus: Prometheus) -> None:
    long = 'label_replace(vector(1), "pod", "vllm-llama-3-70b-instruct-7c9f8d6b5-x2k4p", "", "")'
    (series,) = prometheus.instant(shortened(long))

    assert series["metric"]["pod"] == "…struct-7c9f8d6b5-x2k4p"


def test_nothing_is_drawn_of_an_engine_that_does_not_answer(prometheus: Prometheus) -> None:
    answers = ask_panel(prometheus, "restart", "Sources")
    (engine,) = [series["values"] for series in answers if series["metric"]["source"] == "engine"]
    silent = {at for (_, value_before), (at, value) in pairwise(engine) if value_before == value == "0"}
    running = {
        at for series in ask_panel(prometheus, "restart", HERO, "running requests") for at, _ in series["values"]
    }

    assert silent
    assert not silent & running
    assert len(silent) + len(running) > 0.9 * len(engine)


def test_another_holder_is_seen_only_where_there_is_one(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for target in TARGETS:
        with subtests.test(target=target):
            other_bytes = [
                float(value)
                for series in ask_panel(prometheus, target, HELD, "GPU {{gpu}}")
                for _, value in series["values"]
            ]

            assert (max(other_bytes, default=0.0) > 0) == (target == "neighbour")


def test_the_ledger_is_as_high_as_the_card(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for target in TARGETS:
        with subtests.test(target=target):
            legends = ("{{holder}}", "reserved by the driver", "free")
            layers = [ask_panel(prometheus, target, LEDGER, legend, board=INCIDENT) for legend in legends]

            heights: defaultdict[float, float] = defaultdict(float)
            for at, value in (point for layer in layers for series in layer for point in series["values"]):
                heights[at] += float(value)

            assert set(heights.values()) == {int(SMALL * TOTAL_BYTES) if target == "small card" else TOTAL_BYTES}


def test_of_an_incident_the_empty_card_between_two_runs_is_not_drawn(
    prometheus: Prometheus, subtests: pytest.Subtests
) -> None:
    for target in ["restart", "crash", "asleep"]:
        with subtests.test(target=target):
            (free,) = ask_panel(prometheus, target, "Free memory of each GPU", "GPU {{gpu}}", board=INCIDENT)

            assert max(float(value) for _, value in free["values"]) < TOTAL_BYTES / 8


def test_the_fleets_alerts_name_their_engines_the_most_severe_first(prometheus: Prometheus) -> None:
    fleet = load("headroom-fleet")
    put_in = values(prometheus, fleet, {})

    rows = answer(prometheus, query(fleet, "Firing alerts", ""), put_in)

    named = [(row["metric"]["severity"], row["metric"]["alertname"], row["metric"]["instance"]) for row in rows]
    ranks = [float(row["values"][-1][1]) for row in rows]
    assert ("page", "HeadroomEngineCrashLoop", TARGETS["crash"].labels["instance"]) in named
    assert ("critical", "HeadroomGpuMemoryLeak", TARGETS["leak"].labels["instance"]) in named
    assert ranks == sorted(ranks, reverse=True)
    assert named[0][0] == "page"
