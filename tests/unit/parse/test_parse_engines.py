from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from vllm_headroom.model import INPUTS, EnginePage, EngineReading, Failure
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.vocabulary import Reason, Source

FAMILIES = sorted({family for fact in PROFILES[0].facts for family in fact.families})
NAMES = st.builds(
    str.__add__, st.sampled_from([*PROFILES[0].prefixes, "", "other_"]), st.sampled_from([*FAMILIES, "other"])
)
SETTINGS = ["num_gpu_blocks", "block_size", "kv_cache_size_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes"]
LABELS = st.sampled_from(
    ["model_name", "engine", "pid", "ReplicaId", "sleep_state", "finished_reason", "new", *SETTINGS]
)
WORDS = st.sampled_from(["0", "1", "m", "awake", "None", "nan", "inf", "-1", "0.9", "1e308", "1e999", "", "\\n"])
TEXT = st.text(max_size=20)
NUMBERS = st.one_of(st.floats().map(str), st.integers().map(str), st.sampled_from(["NaN", "+Inf", "9" * 400]), TEXT)


def written(name: str, labels: dict[str, str], number: str) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}} {number}"


LINES = st.builds(written, NAMES, st.dictionaries(LABELS, st.one_of(WORDS, TEXT)), NUMBERS)
PAGES = st.lists(st.one_of(LINES, TEXT), max_size=12).map(lambda lines: "up 1\n" + "".join(f"{li}\n" for li in lines))


def values(engine: EngineReading) -> dict[str, float]:
    field_values = {field.name: getattr(engine, field.name) for field in fields(EngineReading)}
    return {name: value for name, value in field_values.items() if value is not None and not isinstance(value, str)}


def assert_honest(page: str) -> None:
    read = parse_engines(page)
    if isinstance(read, Failure):
        assert read.source is Source.ENGINE
        assert read.reason in {Reason.NOT_METRICS, Reason.INCOMPLETE, Reason.MALFORMED}
        return
    read_values = {name: value for engine in read.engines for name, value in values(engine).items()}

    assert all(0 <= value <= LARGEST for value in read_values.values())
    assert all(value <= 1 for name, value in read_values.items() if name.endswith("_ratio"))
    assert sum(available for _, available in read.inputs) == len(read_values.keys() & INPUTS.keys())


@given(TEXT)
def test_no_text_raises_or_gives_an_impossible_value(page: str) -> None:
    assert_honest(page)


@given(st.binary())
def test_no_bytes_raise_or_give_an_impossible_value(body: bytes) -> None:
    assert_honest(body.decode(errors="replace"))


@given(PAGES)
def test_no_page_of_distorted_lines_raises_or_gives_an_impossible_value(page: str) -> None:
    assert_honest(page)


@given(PAGES, st.data())
def test_no_page_that_is_cut_off_anywhere_raises(page: str, data: st.DataObject) -> None:
    assert_honest(page[: data.draw(st.integers(0, len(page)))])


@pytest.mark.parametrize("page", ["up 1\n", "# EOF\n", "process_start_time_seconds 5\nvllm:unknown 1\n"])
def test_a_page_without_series_of_an_engine_has_no_engines_and_no_inputs(page: str) -> None:
    read = parse_engines(page)

    assert isinstance(read, EnginePage)
    assert (read.profile, read.engines) == ("vllm", ())
    assert [name for name, _ in read.inputs] == [name for name, _ in PROFILES[0].inputs]
    assert not any(is_available for _, is_available in read.inputs)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<html></html>\n", Reason.NOT_METRICS),
        ("up 1\nvllm:num_requests_running{", Reason.INCOMPLETE),
        ("up 1\nvllm:num_requests_running{\n", Reason.MALFORMED),
        (f"up 1\nvllm:num_requests_running 1 {'9' * 400}\n", Reason.MALFORMED),
    ],
)
def test_a_page_that_cannot_be_read_is_a_failure(page: str, reason: Reason) -> None:
    read = parse_engines(page)

    assert isinstance(read, Failure)
    assert read.reason is reason


@pytest.mark.parametrize("value", ["1e300", "9007199254740994", "1.7976931348623157e308"])
def test_a_number_beyond_what_is_counted_exactly_is_not_known(value: str) -> None:
    page = parse_engines(f'vllm:num_requests_running{{model_name="m",engine="0"}} {value}\n')

    assert not isinstance(page, Failure)
    assert page.engines[0].running is None, "of two such engines the sum would be no number, and no state be kept"
