"""What is left of a curve when it is thinned out."""

from __future__ import annotations

from tests.samples import engine, failure, gpu, page, snapshot
from vllm_headroom.expose.drawing import Point, build_curve, thin_curve
from vllm_headroom.vocabulary import Source
from vllm_headroom_tools.history import Curves


def test_a_single_peak_and_a_single_dip_are_kept() -> None:
    points: list[Point] = [(float(second), 10.0) for second in range(1000)]
    points[777], points[333] = (777.0, 99.0), (333.0, 1.0)

    (stretch,) = thin_curve(build_curve(points), 10)

    assert len(stretch) <= 22
    assert (777.0, 99.0) in stretch
    assert (333.0, 1.0) in stretch
    assert stretch == sorted(stretch)


def test_what_could_not_be_read_divides_the_curve() -> None:
    points: list[Point] = [(float(second), None if 40 <= second < 60 else 5.0) for second in range(100)]

    first_piece, second = thin_curve(build_curve(points), 10)

    assert (first_piece[-1][0], second[0][0]) <= (39.0, 60.0)
    assert thin_curve(build_curve([(0.0, None), (1.0, None)]), 10) == []
    assert thin_curve(build_curve([]), 10) == []


def test_a_single_reading_is_a_point() -> None:
    assert thin_curve(build_curve([(5.0, 7.0)]), 10) == [[(5.0, 7.0)]]


def test_a_gpu_that_comes_later_or_goes_is_unknown_meanwhile() -> None:
    curves = Curves()
    curves.step(snapshot(at=1, gpus=(gpu(uuid="GPU-a", used=5),), engines=page(engine("0"), engine("1"))))
    curves.step(
        snapshot(at=2, gpus=(gpu(uuid="GPU-b", used=6),), engines=page(engine("0", running=1), engine("1", running=2)))
    )
    curves.step(snapshot(at=3, gpus=failure(Source.NVML), engines=failure(Source.ENGINE)))
    curves.step(snapshot(at=4, gpus=(), engines=page(engine("0", running=1), engine("1"))))

    assert [value for _, value in curves.of("held", "GPU-a")] == [5, None, None, None]
    assert [value for _, value in curves.of("held", "GPU-b")] == [6, None, None]
    assert [value for _, value in curves.of("running")] == [None, 3, None, None]


def test_a_clock_that_was_set_back_loses_no_point() -> None:
    (stretch,) = thin_curve(build_curve([(50.0, 1.0), (60.0, 9.0), (0.0, 2.0), (10.0, 3.0)]), 10)

    assert stretch == [(0.0, 2.0), (10.0, 3.0), (50.0, 1.0), (60.0, 9.0)]
