from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.scrape.gpu_state import WINDOW_SECONDS, RecentPeak


def test_without_samples_there_is_no_peak() -> None:
    assert RecentPeak().highest_bytes(0.0) is None


def test_a_sample_counts_for_a_minute() -> None:
    peak = RecentPeak()
    peak.add(0.0, 7)

    assert peak.highest_bytes(60.0) == 7
    assert peak.highest_bytes(60.1) is None


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 5)), max_size=60))
def test_the_peak_is_the_highest_sample_of_the_window(steps: list[tuple[float, int]]) -> None:
    peak, now, samples = RecentPeak(), 0.0, []
    for step_seconds, used_bytes in steps:
        now += step_seconds
        samples.append((now, used_bytes))
        peak.add(now, used_bytes)

        assert peak.highest_bytes(now) == max(used for at, used in samples if at >= now - WINDOW_SECONDS)
