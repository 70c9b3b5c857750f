import pytest

from vllm_headroom.inputs import parse_ratio
from vllm_headroom.units import (
    RefusedError,
    format_gib,
    format_instant,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
    parse_vllm_number,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("120s", 120),
        (" 15m ", 900),
        ("2 min", 120),
        ("1.5h", 5400),
        ("0", 0),
        ("1d", 86400),
        ("1h30m", 5400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1y", "1e3", "nan", "1,5s", "1M", "٣s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "ratio"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("1", 1)])
def test_shares(text: str, ratio: float) -> None:
    assert parse_share(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["", "%", "-5%", "5 percent", "inf", "1e-2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        parse_share(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("1048576", 2**20), ("8MiB", 2**23), ("1kB", 1000), ("72 GiB", 72 * 2**30), ("1B", 1), (".5Ki", 512)],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "0", "0GiB", "8X", "-1MiB", "1e9", "9" * 20, "nan", "٣GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1", "80", "1048575", "70.5"])
def test_so_few_bytes_without_a_unit_are_not_meant(text: str) -> None:
    with pytest.raises(RefusedError, match=f"^without a unit it is bytes: {text}GiB[?]$"):
        parse_size(text)


@pytest.mark.parametrize(("text", "unit"), [("8G", "G"), ("8 Gb", "Gb"), ("8g", "g")])
def test_a_unit_with_two_meanings_is_refused(text: str, unit: str) -> None:
    with pytest.raises(RefusedError, match=f"^{unit} has two meanings: 8GiB or 8GB[?]$"):
        parse_size(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20, "1 MiB"),
        (-(2**31), "-2 GiB"),
        (72.5 * 2**30, "72.5 GiB"),
    ],
)
def test_sizes_are_shown_in_three_digits_with_a_binary_prefix(n_bytes: float, text: str) -> None:
    assert format_size(n_bytes) == text


def test_gibibytes_are_shown_as_vllm_logs_them() -> None:
    assert format_gib(1234.5 * 2**30) == "1,234.50 GiB"


@pytest.mark.parametrize(
    ("text", "number"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("25.6k", 25600), ("2m", 2_000_000)]
)
def test_numbers_as_vllm_writes_them(text: str, number: int) -> None:
    assert parse_vllm_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "25.6K", "32kB", "1.5", "many"])
def test_what_vllm_takes_for_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the option has the text
        parse_vllm_number(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9_223_372_037.0, "2262-04-11 23:47:17Z"),
        (253_402_300_799.0, "9999-12-31 23:59:59Z"),
        (253_402_300_800.0, "9999-12-31 23:59:59Z"),
        (1e300, "9999-12-31 23:59:59Z"),
    ],
)
def test_a_time_that_no_date_can_express_is_the_nearest_date(seconds: float, text: str) -> None:
    assert format_instant(seconds) == text


@pytest.mark.parametrize(("text", "ratio"), [("0.92", 0.92), ("92%", 0.92), (".5", 0.5), ("1", 1.0), ("1e-1", 0.1)])
def test_a_ratio_may_be_a_percentage(text: str, ratio: float) -> None:
    assert parse_ratio(text) == pytest.approx(ratio)


def test_a_ratio_that_is_meant_as_a_percentage_has_a_hint() -> None:
    with pytest.raises(RefusedError, match=r"did you mean 92%\?"):
        parse_ratio("92")
