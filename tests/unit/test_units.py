import pytest

from vllm_headroom.units import duration_seconds, share


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("120s", 120), (" 15m ", 900), ("2 min", 120), ("1.5h", 5400), ("0", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "1e3", "nan", "1,5s", "1M", "٣s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        duration_seconds(text)


@pytest.mark.parametrize(("text", "ratio"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("1", 1)])
def test_shares(text: str, ratio: float) -> None:
    assert share(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["", "%", "-5%", "5 percent", "inf", "1e-2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        share(text)
