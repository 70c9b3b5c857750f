from __future__ import annotations

from msgspec.structs import replace

from tests.samples import engine, failure, gpu, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.residue import FREEING_SECONDS, SleepState, derive_sleep
from vllm_headroom.model import EnginePage, EngineStatus, Failure, Gpu
from vllm_headroom.vocabulary import EngineState, Source


class Night:
    """Looks every ten seconds; `residue` is what is said after each."""

    def __init__(self) -> None:
        self.at = 0.0
        self._state = SleepState()

    def look(
        self,
        held_bytes: int | None,
        *,
        awake: bool | None = False,
        started: float = 1.0,
        engines: EnginePage | Failure | None = None,
        to_wake: int | None = None,
    ) -> float | None:
        self.at += 10.0
        engine_page = page(engine(awake=awake, started_at_seconds=started)) if engines is None else engines
        tick_snapshot = snapshot(at=self.at, engines=engine_page, gpus=self.gpus(held_bytes))
        if to_wake is not None:
            tick_snapshot = replace(
                tick_snapshot, engine_status=EngineStatus(state=EngineState.ASLEEP, wake_bytes=(("GPU-a", to_wake),))
            )
        self._state, samples = derive_sleep(self._state, tick_snapshot)
        return values(samples, catalog.SLEEP_RESIDUE).get(("0", "GPU-a"))

    def gpus(self, held_bytes: int | None) -> tuple[Gpu, ...]:
        return (gpu(held=held_bytes),)

    def slept(self, held_bytes: int) -> float | None:
        """Let it sleep until that has settled."""
        for _ in range(int(FREEING_SECONDS / 10)):
            self.look(held_bytes)
        return self.look(held_bytes)


def test_what_is_held_a_moment_after_it_fell_asleep_is_the_residue() -> None:
    night = Night()

    assert night.look(800, awake=True) is None
    assert [night.look(800), night.look(400), night.look(40), night.look(40)] == [None, None, None, 40]


def test_the_last_sleeps_figure_stays_until_the_next_has_settled() -> None:
    night = Night()
    night.slept(40)

    assert night.look(800, awake=True) == 40
    assert [night.look(800), night.look(90), night.look(90), night.look(90)] == [40, 40, 40, 90]
    assert night.look(95) == 90


def test_memory_that_is_taken_up_before_the_page_says_so_is_no_residue() -> None:
    night = Night()
    night.slept(40)

    assert night.look(700) == 40
    assert night.look(800, awake=True) == 40


def test_a_page_or_a_gpu_that_cannot_be_read_leaves_it_as_it_was() -> None:
    night = Night()
    night.slept(40)

    assert night.look(40, engines=failure(Source.ENGINE)) == 40
    assert night.look(None) == 40


def test_a_scheduler_that_is_paused_keeps_all_and_has_no_residue() -> None:
    night = Night()
    night.slept(40)
    night.look(800, awake=True)

    assert [night.look(798, to_wake=2) for _ in range(6)][-1] == 40
    assert [night.look(500, to_wake=300) for _ in range(2)][-1] == 500, "one that gives back too little has one"


def test_another_run_has_not_slept_yet() -> None:
    night = Night()
    night.slept(40)

    assert night.look(800, awake=True, started=2.0) is None
    assert night.look(50, started=2.0) is None


def test_an_engine_that_does_not_say_whether_it_sleeps_has_no_residue() -> None:
    night = Night()

    assert [night.look(800, awake=None) for _ in range(9)] == [None] * 9


def test_servers_that_answer_in_turn_sleep_as_one() -> None:
    night = Night()

    assert [night.look(40, started=started) for started in (2.0, 1.0, 2.0, 1.0, 2.0)][-1] == 40
