"""An engine that holds more than its budget: from when, by how much, and what its exit is called."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.samples import gpu
from tests.unit.derive.life.watch import BEGAN, GIB, NEXT, REFUSED, WHOLE, Watch, card, working
from vllm_headroom.derive.life.causes import is_over_budget, judge_ending
from vllm_headroom.derive.life.engine import update_engine
from vllm_headroom.model import BudgetExcess, EngineStatus, Gpu
from vllm_headroom.vocabulary import EndCause, ExitReason, Sureness

SHARE = 0.94
BUDGET_GIB = 80 * SHARE
MINUTE = 60.0


def at_work(watch: Watch, minutes: float, held_gib: float, *, gpus: tuple[Gpu, ...] = (), **page: Any) -> EngineStatus:
    """Return the status after so many minutes of work."""
    page_fields = {"gpu_memory_utilization_ratio": SHARE, "running": 20.0, **page}
    for step in range(int(minutes * 4)):
        status = watch.look(working(watch.at + step, **page_fields), gpus=gpus or (card(held_gib),), after_seconds=15.0)
    return status


def alone(held_gib: float) -> Gpu:
    """Return a card on which nobody else is known to hold anything."""
    held_bytes = int(held_gib * GIB)
    return gpu(uuid="GPU-a", total=80 * GIB, used=held_bytes, engine=held_bytes, other=0)


def excess_of(status: EngineStatus) -> BudgetExcess | None:
    return dict(status.excesses).get("GPU-a")


def ended(watch: Watch, **look_fields: Any) -> EngineStatus:
    return watch.look(REFUSED, processes=(), gpus=(card(0.5),), **look_fields)


def test_an_excess_from_the_first_work_on_is_measured_at_rest() -> None:
    watch = Watch()
    at_work(watch, 5, BUDGET_GIB - 4, running=0.0)
    at_work(watch, 20, BUDGET_GIB + 3.5)
    excess = excess_of(at_work(watch, 1, 79.5))

    assert excess is not None
    assert excess.excess_bytes == pytest.approx(3.5 * GIB, abs=2)
    assert excess.seconds == pytest.approx(21 * MINUTE, abs=15)
    assert excess.is_from_start
    assert excess.lower_utilization(SHARE) == 0.89
    assert excess.needed_bytes == int(0.8 * GIB), "the usual peak of a card of 80 GiB"


@pytest.mark.parametrize(
    ("held_gib", "page"),
    [
        pytest.param(BUDGET_GIB + 0.9, {}, id="a context and graphs"),
        pytest.param(BUDGET_GIB + 2.2, {}, id="less than 3 %"),
        pytest.param(BUDGET_GIB + 3.5, {"kv_cache_memory_bytes": 40.0 * GIB}, id="a cache sized in bytes"),
        pytest.param(60.0, {"gpu_memory_utilization_ratio": 0.5}, id="a cache sized in blocks"),
        pytest.param(BUDGET_GIB + 3.5, {"finished_total": 0, "running": 0.0}, id="no work yet"),
    ],
)
def test_a_healthy_engine_is_not_over_its_budget(held_gib: float, page: dict[str, Any]) -> None:
    watch = Watch()
    page_fields = {"gpu_memory_utilization_ratio": SHARE, "running": 20.0, **page}
    done = page_fields.pop("finished_total", None)
    for step in range(40):
        status = watch.look(
            working(step if done is None else done, **page_fields), gpus=(card(held_gib),), after_seconds=15.0
        )

    assert excess_of(status) is None


@pytest.mark.parametrize(
    ("card_gib", "share", "outside_gib"),
    [
        pytest.param(79.65, 0.92, 2.6, id="an H100"),
        pytest.param(79.65, 0.92, 4.1, id="an H100 in a busy hour"),
        pytest.param(9.75, 0.92, 0.62, id="a slice of 10 GB"),
        pytest.param(11.75, 0.92, 0.68, id="a slice of 12 GB"),
        pytest.param(22.5, 0.95, 0.85, id="an L4"),
    ],
)
def test_what_healthy_engines_hold_outside_of_their_budgets_leaves_enough(
    card_gib: float, share: float, outside_gib: float
) -> None:
    watch = Watch()
    held_bytes = int((card_gib * share + outside_gib) * GIB)
    healthy = gpu(
        uuid="GPU-a", total=int(card_gib * GIB), used=held_bytes, engine=held_bytes, other=0, used_peak_bytes=held_bytes
    )
    excess = excess_of(at_work(watch, 10, 0, gpus=(healthy,), gpu_memory_utilization_ratio=share))

    assert excess is None or card_gib * (1 - share) - outside_gib > excess.tight_bytes / GIB


def test_an_excess_that_grew_later_is_not_from_the_start() -> None:
    watch = Watch()
    at_work(watch, 20, BUDGET_GIB + 0.5)
    excess = excess_of(at_work(watch, 10, BUDGET_GIB + 3.5))

    assert excess is not None
    assert not excess.is_from_start


def test_an_excess_lasts_through_a_dip_and_is_over_with_a_fall() -> None:
    watch = Watch()
    at_work(watch, 10, BUDGET_GIB + 3.5)
    through = excess_of(at_work(watch, 5, BUDGET_GIB + 2))
    later_budget_excess = excess_of(at_work(watch, 5, BUDGET_GIB + 1))

    assert through is not None
    assert through.seconds == pytest.approx(15 * MINUTE, abs=15)
    assert later_budget_excess is None


def test_the_largest_peak_that_an_engine_has_shown_is_what_a_burst_takes() -> None:
    watch = Watch()
    at_work(watch, 5, 0, gpus=(card(BUDGET_GIB + 2.5, peak_gib=BUDGET_GIB + 4.2),))
    excess = excess_of(at_work(watch, 10, BUDGET_GIB + 2.5))
    shared = gpu(total=80 * GIB, used=79 * GIB, engine=78 * GIB, other=GIB, used_peak_bytes=80 * GIB)
    beside_others = Watch()

    assert excess is not None
    assert excess.needed_bytes == pytest.approx(1.7 * GIB, abs=2)
    at_work(beside_others, 5, 0, gpus=(shared,))
    budget_excess = excess_of(at_work(beside_others, 1, 78))
    assert budget_excess is not None
    assert budget_excess.needed_bytes == int(0.8 * GIB), "a peak may have been anybody's"


def test_the_operators_figure_is_a_budget_too() -> None:
    watch = Watch()
    at_work(watch, 10, 78, gpu_memory_utilization_ratio=None)
    assert watch.seen is not None

    _, snapshot = update_engine(watch.state, watch.seen, configured_bytes=74.0 * GIB)

    assert snapshot.engine_status is not None
    excess = excess_of(snapshot.engine_status)
    assert excess is not None
    assert excess.excess_bytes == 4 * GIB


def test_an_exit_with_little_left_is_counted_as_over_budget_with_what_gives_it_back() -> None:
    watch = Watch()
    at_work(watch, 3, BUDGET_GIB - 3, running=0.0)
    at_work(watch, 60, BUDGET_GIB + 3.68)
    status = ended(watch)

    assert status.event is not None
    assert dict(status.exits)[ExitReason.OVER_BUDGET] == 1
    finding, *other_findings = judge_ending(status.event)
    assert (finding.cause, finding.sureness) == (EndCause.OVER_BUDGET, Sureness.LIKELY)
    assert finding.sentence == (
        "Over its budget from the start: the engine held 3.68 GiB (4.9 %) more than it on GPU 0, for 59 min 45 s."
    )
    assert finding.evidence[-1] == "--gpu-memory-utilization 0.89 in place of 0.94 gives that back"
    assert {other_finding.cause for other_finding in other_findings} <= {EndCause.CRASH}
    life = watch.look(working(0, started=1_760_009_000.0), processes=NEXT)
    assert dict(life.exits)[ExitReason.OVER_BUDGET] == 1


def test_an_engine_over_its_budget_whose_gpu_was_full_surely_died_of_it() -> None:
    watch = Watch()
    at_work(watch, 3, 0, gpus=(alone(BUDGET_GIB - 3),), running=0.0)
    at_work(watch, 60, 0, gpus=(alone(BUDGET_GIB + 3.68),))
    watch.look(working(900, running=20.0, gpu_memory_utilization_ratio=SHARE), gpus=(alone(79.9),))
    status = ended(watch)

    assert status.event is not None
    assert status.exit_reason is ExitReason.OVER_BUDGET
    assert [(diagnosis.cause, diagnosis.sureness) for diagnosis in judge_ending(status.event)] == [
        (EndCause.OVER_BUDGET, Sureness.SURE)
    ]


@pytest.mark.parametrize(
    ("held_gib", "running", "reason"),
    [
        pytest.param(BUDGET_GIB + 2.5, 20.0, ExitReason.GONE, id="enough left"),
        pytest.param(BUDGET_GIB + 3.68, 0.0, ExitReason.GONE, id="idle: a stop"),
        pytest.param(79.9, 20.0, ExitReason.OVER_BUDGET, id="full from the start"),
    ],
)
def test_only_a_death_at_work_with_little_left_is_over_budget(
    held_gib: float, running: float, reason: ExitReason
) -> None:
    watch = Watch()
    at_work(watch, 3, BUDGET_GIB - 3, running=0.0)
    at_work(watch, 30, held_gib)
    at_work(watch, 5, held_gib, running=running)

    assert ended(watch).exit_reason is reason


def test_an_excess_that_left_more_than_little_is_possible_and_no_burst() -> None:
    watch = Watch()
    at_work(watch, 3, BUDGET_GIB - 3, running=0.0)
    at_work(watch, 30, BUDGET_GIB + 2.5)
    status = ended(watch)

    assert status.event is not None
    findings = {finding.cause: finding for finding in judge_ending(status.event)}
    finding = findings[EndCause.OVER_BUDGET]
    assert finding.sureness is Sureness.POSSIBLE
    assert finding.sentence == (
        "Over its budget from the start, perhaps: the engine held 2.5 GiB (3.3 %) more than it on GPU 0,"
        " 2.3 GiB were left, and one allocation may have needed more."
    )
    assert EndCause.BURST not in findings
    assert "--gpu-memory-utilization 0.90 in place of 0.94 gives that back" in finding.evidence


@pytest.mark.parametrize("reason", [ExitReason.REPLACED, ExitReason.STOPPED])
def test_a_restart_by_hand_of_an_engine_over_its_budget_is_not_its_budgets_fault(reason: ExitReason) -> None:
    watch = Watch()
    at_work(watch, 3, BUDGET_GIB - 3, running=0.0)
    at_work(watch, 30, BUDGET_GIB + 3.68)
    status = ended(watch)

    assert status.event is not None
    assert is_over_budget(status.event)
    assert not is_over_budget(replace(status.event, reason=reason))


def test_each_exit_of_a_crash_loop_is_counted_however_short_its_run_was() -> None:
    watch = Watch()
    for run in range(3):
        processes = tuple(replace(process, pid=process.pid + 100 * run) for process in WHOLE)
        watch.look(REFUSED, processes=processes, gpus=(card(40),))
        started = BEGAN + watch.at
        for step in range(6):
            page = working(step + 1, running=20.0, started=started, gpu_memory_utilization_ratio=SHARE)
            watch.look(page, gpus=(card(BUDGET_GIB + 3.68 if step else 76),))
        status = ended(watch)

    assert dict(status.exits)[ExitReason.OVER_BUDGET] == 3


def test_what_a_burst_or_a_leak_took_after_the_first_minutes_is_not_the_budgets_fault() -> None:
    watch = Watch()
    at_work(watch, 3, 70, running=0.0, gpu_memory_utilization_ratio=0.92)
    at_work(watch, 30, 76.2, gpu_memory_utilization_ratio=0.92)
    watch.look(working(900, running=20.0, gpu_memory_utilization_ratio=0.92), gpus=(card(79.9),))
    status = ended(watch)

    assert status.exit_reason is ExitReason.OUT_OF_MEMORY


def grown(watch: Watch, gib_per_look: float, looks: int, **page: Any) -> None:
    """Grow from 74 GiB, five seconds a look."""
    for look in range(looks):
        held_gib = 74 + gib_per_look * (look + 1)
        watch.look(working(5000 + 10 * look, **{"running": 20.0, **page}), gpus=(card(held_gib),))


def test_growth_in_a_straight_line_under_a_level_load_is_no_burst() -> None:
    watch = Watch()
    at_work(watch, 20, 74, gpu_memory_utilization_ratio=None)
    grown(watch, 0.162, 36)
    status = ended(watch)

    assert status.event is not None
    assert status.exit_reason is ExitReason.OUT_OF_MEMORY
    (finding,) = judge_ending(status.event)
    assert (finding.cause, finding.sureness) == (EndCause.LEAK, Sureness.LIKELY)
    assert finding.sentence == (
        "Out of GPU memory by a leak: the engine grew in a straight line under a level load, by 33.2 MiB a second"
        " for 2 min 50 s, until GPU 0 was full."
    )


@pytest.mark.parametrize(
    ("gib_per_look", "looks", "page"),
    [
        pytest.param(0.5, 12, {}, id="a minute"),
        pytest.param(0.162, 36, {"running": 60.0}, id="three times the load"),
        pytest.param(0.162, 36, {"running": None}, id="a load that is not known"),
    ],
)
def test_growth_in_a_minute_or_with_the_load_is_a_burst(gib_per_look: float, looks: int, page: dict[str, Any]) -> None:
    watch = Watch()
    at_work(watch, 20, 74, gpu_memory_utilization_ratio=None)
    grown(watch, gib_per_look, looks, **page)
    status = ended(watch)

    assert status.event is not None
    assert judge_ending(status.event)[0].cause is EndCause.BURST


@pytest.mark.parametrize("started_at", [1_760_000_000.0 - 85, None])
def test_a_start_that_fills_the_gpu_at_capture_never_fitted(started_at: float | None) -> None:
    """The sidecar came while the weights loaded, or saw one start after another fail; no page ever answered."""
    watch = Watch(processes=NEXT if started_at is None else None, gpus=(card(0.5),)) if started_at is None else Watch()
    if started_at is None:
        watch.look(REFUSED, processes=())
    for look in range(20):
        watch.look(REFUSED, processes=NEXT, gpus=(card(70 if look < 12 else 79.97),))
    status = watch.look(REFUSED, processes=(), gpus=(card(0.5),))

    assert status.event is not None
    assert judge_ending(status.event)[0].cause is EndCause.NEVER_FITTED
