"""What an engine that sleeps takes of its GPUs when it wakes."""

from __future__ import annotations

from tests.unit.derive.life.watch import BEGAN, GIB, NEXT, Watch, card, working


def test_what_a_sleeper_gave_back_is_what_it_takes_to_wake() -> None:
    watch = Watch(gpus=(card(60),))
    watch.look(working(10))
    assert watch.look(working(20), gpus=(card(72),)).wake_bytes == ()
    asleep = working(20, running=0.0, awake=False)

    assert watch.look(asleep, gpus=(card(3),)).wake_bytes == (("GPU-a", 69 * GIB),)
    watch.look(working(30), gpus=(card(65),))
    assert watch.look(asleep, gpus=(card(4),)).wake_bytes == (("GPU-a", 61 * GIB),), "as of this time awake"


def test_what_a_sleeper_takes_is_not_known_of_one_that_nobody_saw_awake() -> None:
    watch = Watch()
    watch.look(working(10))
    another = working(5, running=0.0, awake=False, started=BEGAN + 9000)

    assert watch.look(another, processes=NEXT, gpus=(card(3),)).wake_bytes == ()
