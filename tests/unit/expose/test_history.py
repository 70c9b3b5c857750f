"""The day's curves and what changed in it."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tests.samples import failure, gpu, snapshot
from vllm_headroom.expose.drawing import Curve, Point
from vllm_headroom.expose.view import (
    CURVE_POINTS,
    CURVE_STEP_SECONDS,
    MOST_CURVE_GPUS,
    MOST_CURVES,
    MOST_HISTORY_EVENTS,
    WEEK_POINTS,
    WEEK_STEP_MINUTES,
    History,
    VerdictStart,
)
from vllm_headroom.model import EngineStatus, Snapshot, Verdict
from vllm_headroom.vocabulary import EngineState, Level, Source

DAY: Final = CURVE_POINTS * CURVE_STEP_SECONDS
BEGIN: Final = 1_760_000_040.0
GOOD: Final = Verdict(subject="GPU 0", level=Level.GOOD, sentence="GPU 0: no leak seen.")
BAD: Final = Verdict(subject="GPU 0", level=Level.ALARM, sentence="GPU 0 leaks.", alert="HeadroomGpuMemoryLeak")

DOZING: Final = Verdict(subject="GPU 0", level=Level.GOOD, sentence="GPU 0: the engine sleeps.")


def at(seconds: float, *, used: int = 900, peak: int | None = None) -> Snapshot:
    return replace(snapshot(gpus=(gpu(used=used, used_peak_bytes=peak),)), time_seconds=BEGIN + seconds)


def points(curve: Curve) -> list[Point]:
    return list(zip(*curve, strict=True))


def history(*snapshots: Snapshot) -> History:
    new_history = History()
    for tick_snapshot in snapshots:
        new_history.step(tick_snapshot, (), None)
    return new_history


def test_a_minute_keeps_its_lowest() -> None:
    recorded_history = history(at(0, used=900), at(5, used=950), at(10, used=910), at(60, used=800))

    assert points(recorded_history.read_curve("free GPU-a")) == [(BEGIN, 50.0), (BEGIN + 60, 200.0)]


def test_what_a_peak_left_is_apart() -> None:
    assert points(history(at(0, used=900, peak=990)).read_curve("peak GPU-a")) == [(BEGIN, 10.0)]
    assert points(history(at(0, used=900, peak=100)).read_curve("peak GPU-a")) == [(BEGIN, 100.0)]
    assert points(history(at(0)).read_curve("peak GPU-a")) == []


def test_minutes_without_a_reading_are_gaps() -> None:
    unread = replace(at(60), gpus=failure(Source.NVML))

    assert points(history(at(0), unread, at(120)).read_curve("free GPU-a")) == [
        (BEGIN, 100.0),
        (BEGIN + 60, None),
        (BEGIN + 120, 100.0),
    ]


def test_after_a_day_the_oldest_is_forgotten() -> None:
    recorded_history = history(at(0, used=1), at(DAY - 60), at(DAY))

    assert [point for point in points(recorded_history.read_curve("free GPU-a")) if point[1] is not None] == [
        (BEGIN + DAY - 60, 100.0),
        (BEGIN + DAY, 100.0),
    ]


def test_a_day_without_samples_leaves_nothing_of_the_day_before() -> None:
    assert points(history(at(0), at(3 * DAY)).read_curve("free GPU-a")) == [(BEGIN + 3 * DAY, 100.0)]


def test_a_clock_that_is_set_back_starts_over() -> None:
    assert points(history(at(600), at(0)).read_curve("free GPU-a")) == [(BEGIN, 100.0)]


def test_a_clock_that_steps_back_over_the_turn_of_a_minute_costs_no_point() -> None:
    recorded_history = history(at(0, used=900), at(60, used=800), at(59.9, used=850), at(120, used=700))

    assert points(recorded_history.read_curve("free GPU-a")) == [
        (BEGIN, 100.0),
        (BEGIN + 60, 150.0),
        (BEGIN + 120, 300.0),
    ]


def test_gpus_that_have_gone_make_room_for_those_that_are_there() -> None:
    minutes = range(2 * MOST_CURVE_GPUS)
    here = [(gpu(used=minute), gpu(used=minute, uuid=f"MIG-{minute}")) for minute in minutes]
    recorded_history = history(*(replace(at(60 * minute), gpus=gpus) for minute, gpus in enumerate(here)))

    assert points(recorded_history.read_curve("free GPU-a")) == [
        (BEGIN + 60 * minute, 1000.0 - minute) for minute in minutes
    ]
    assert points(recorded_history.read_curve(f"free MIG-{minutes[-1]}")) == [
        (BEGIN + 60 * minutes[-1], 1000.0 - minutes[-1])
    ]
    assert len(recorded_history.save().curves) <= MOST_CURVES + 2


def test_every_gpu_of_a_full_machine_is_followed() -> None:
    gpus = tuple(gpu(uuid=f"GPU-{index}", used_peak_bytes=900) for index in range(MOST_CURVE_GPUS))
    recorded_history = History()
    for minute in range(3):
        recorded_history.step(replace(at(60 * minute), gpus=gpus), (), 1.0)

    assert {len(points(recorded_history.read_curve(f"free {device.reading.uuid}"))) for device in gpus} == {3}


def test_a_gpu_of_others_is_not_followed() -> None:
    unowned = replace(at(0), gpus=(gpu(attribution=None),))

    assert points(history(unowned).read_curve("free GPU-a")) == []


def test_the_most_requests_of_a_minute_are_kept() -> None:
    recorded_history = History()
    for seconds, running in ((0, 4.0), (5, 9.0), (10, 1.0)):
        recorded_history.step(at(seconds), (), running)

    assert points(recorded_history.read_curve("running")) == [(BEGIN, 9.0)]


def test_a_changed_verdict_is_an_event_and_a_changed_figure_is_not() -> None:
    recorded_history = History()
    for seconds, verdict in ((0, GOOD), (5, replace(GOOD, sentence="GPU 0: no leak seen at all.")), (10, BAD)):
        recorded_history.step(at(seconds), (verdict,), None)

    assert [(event.seconds, event.text) for event in recorded_history.events] == [(BEGIN + 10, "GPU 0 leaks.")]


def test_a_leak_is_one_event_however_often_its_engine_sleeps() -> None:
    recorded_history = History()
    for seconds, verdict, state in (
        (0, GOOD, EngineState.SERVING),
        (5, BAD, EngineState.SERVING),
        (10, DOZING, EngineState.ASLEEP),
        (15, DOZING, EngineState.ASLEEP),
        (20, BAD, EngineState.SERVING),
        (25, GOOD, EngineState.SERVING),
        (30, BAD, EngineState.SERVING),
    ):
        recorded_history.step(replace(at(seconds), engine_status=EngineStatus(state=state)), (verdict,), None)

    assert [event.seconds - BEGIN for event in recorded_history.events if event.text == BAD.sentence] == [5, 30]


def test_events_are_bounded() -> None:
    recorded_history = History()
    for step in range(2 * MOST_HISTORY_EVENTS):
        recorded_history.step(at(step), (BAD if step % 2 else GOOD,), None)

    assert len(recorded_history.events) == MOST_HISTORY_EVENTS


def test_a_later_process_goes_on_from_what_was_kept() -> None:
    earlier_history, later_history = history(at(0)), History()

    later_history.restore(earlier_history.save())
    later_history.step(at(120), (), None)

    assert points(later_history.read_curve("free GPU-a")) == [(BEGIN, 100.0), (BEGIN + 60, None), (BEGIN + 120, 100.0)]


def test_curves_of_another_length_are_left_out() -> None:
    saved_history, later_history = history(at(0)).save(), History()

    later_history.restore(replace(saved_history, curves={**saved_history.curves, "running": b"x" * 75}))

    assert points(later_history.read_curve("free GPU-a")) == [(BEGIN, 100.0)]
    assert points(later_history.read_curve("running")) == []


def test_what_changed_while_no_process_looked_is_an_event() -> None:
    earlier_history, later_history = History(), History()
    earlier_history.step(at(0), (GOOD,), None)
    later_history.restore(earlier_history.save())
    later_history.step(at(300), (BAD,), None)
    later_history.step(at(305), (BAD,), None)

    assert [(event.seconds, event.text) for event in later_history.events] == [(BEGIN + 300, "GPU 0 leaks.")]


def test_a_number_beyond_any_is_no_point() -> None:
    recorded_history = History()
    for seconds, running in ((0, 4.0), (60, 1e300), (120, 5.0)):
        recorded_history.step(at(seconds), (), running)

    assert points(recorded_history.read_curve("running")) == [(BEGIN, 4.0), (BEGIN + 60, None), (BEGIN + 120, 5.0)]


def test_a_week_has_the_lowest_of_each_ten_minutes_and_takes_less_than_the_day() -> None:
    step = 60 * WEEK_STEP_MINUTES
    begin = BEGIN - BEGIN % step
    recorded_history = history(*(at(begin - BEGIN + 60 * minute, used=900 + minute % 10) for minute in range(30)))

    week = points(recorded_history.read_curve("free GPU-a", 7 * 86400.0))

    assert week == [(begin, 91.0), (begin + step, 91.0), (begin + 2 * step, 91.0)]
    assert len(recorded_history.read_curve("free GPU-a", 86400.0)[0]) == 30
    assert WEEK_POINTS < CURVE_POINTS


def test_a_week_outlives_the_day_and_the_process() -> None:
    earlier_history = history(at(0), at(3 * DAY))
    later_history = History()
    later_history.restore(earlier_history.save())
    later_history.step(at(3 * DAY + 60), (), None)

    week = [value for _, value in points(later_history.read_curve("free GPU-a", 7 * 86400.0)) if value is not None]

    assert week == [100.0, 100.0]
    assert len(points(later_history.read_curve("free GPU-a"))) == 2


def test_after_a_week_the_oldest_is_forgotten() -> None:
    recorded_history = history(at(0), at(8 * 86400), at(8 * 86400 + 600))

    assert len(points(recorded_history.read_curve("free GPU-a", 7 * 86400.0))) == 2


def test_since_when_a_verdict_holds_is_known_and_kept() -> None:
    recorded_history = History()
    recorded_history.step(at(0), (GOOD,), None)
    recorded_history.step(at(5), (BAD,), None)
    later_history = History()
    later_history.restore(recorded_history.save())
    later_history.step(at(65), (BAD,), None)

    start = later_history.find_start(BAD, None)

    assert start is not None
    assert (start.seconds, start.is_exact) == (BEGIN + 5, True)
    assert later_history.find_start(GOOD, None) is None


def test_a_verdict_of_the_first_sample_may_have_held_before() -> None:
    recorded_history = History()
    recorded_history.step(at(0), (BAD,), None)
    start = recorded_history.find_start(BAD, None)

    assert isinstance(start, VerdictStart)
    assert not start.is_exact


def test_how_long_starts_took_is_kept_for_the_last_five() -> None:
    recorded_history = History()
    for start in range(7):
        began = 10_000.0 * start
        for seconds, state in ((0.0, EngineState.STARTING), (60.0 + start, EngineState.SERVING)):
            status = EngineStatus(state=state, began_seconds=BEGIN + began)
            recorded_history.step(replace(at(began + seconds), engine_status=status), (), None)
    later_history = History()
    later_history.restore(recorded_history.save())

    assert later_history.start_durations_seconds == (62.0, 63.0, 64.0, 65.0, 66.0)
