from __future__ import annotations

import pytest

from tests.unit.parse.pages import ENGINE, RUNNING, one, read
from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines


@pytest.mark.parametrize("prefix", ["vllm:", "ray_vllm:", "ray_vllm_", "vllm_"])
def test_each_prefix_is_understood(prefix: str) -> None:
    assert one(f"{prefix}num_requests_running{{{ENGINE}}} 3").running == 3


def test_one_prefix_counts_when_a_page_has_two() -> None:
    assert one(f"vllm_num_requests_running{{{ENGINE}}} 3", f"vllm:num_requests_running{{{ENGINE}}} 4").running == 4


@pytest.mark.parametrize(
    ("new", "old", "field"),
    [
        ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_used_ratio"),
        ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "prefix_queries_total"),
        ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "prefix_hits_total"),
        ("generation_tokens_total", "generation_tokens", "generation_tokens_total"),
    ],
)
def test_the_old_name_is_read_only_where_the_new_one_says_nothing(new: str, old: str, field: str) -> None:
    new_line, old_line = f"vllm:{new}{{{ENGINE}}} 0.25", f"vllm:{old}{{{ENGINE}}} 0.5"

    assert getattr(one(old_line, new_line), field) == 0.25
    assert getattr(one(old_line), field) == 0.5
    assert getattr(one(old_line, f"vllm:{new}{{{ENGINE}}} NaN"), field) == 0.5


def test_finished_requests_are_summed_over_their_reasons() -> None:
    lines = [
        f'vllm:request_success_total{{{ENGINE},finished_reason="{reason}"}} {count}'
        for reason, count in (("stop", 5), ("length", 2), ("abort", 0))
    ]

    assert one(*lines).finished_total == 7


def test_of_series_that_differ_in_pid_the_highest_is_true() -> None:
    lines = [f'vllm:kv_cache_usage_perc{{{ENGINE},pid="{pid}"}} {value}' for pid, value in ((1, 0), (2, 0.5))]

    assert one(*lines).kv_used_ratio == 0.5


@pytest.mark.parametrize("label", ["ReplicaId", "anything_new"])
def test_amounts_of_replicas_add_up_and_their_ratios_average(label: str) -> None:
    engine = one(
        f'vllm:num_requests_running{{{ENGINE},{label}="a"}} 3',
        f'vllm:num_requests_running{{{ENGINE},{label}="b"}} 4',
        f'vllm:kv_cache_usage_perc{{{ENGINE},{label}="a"}} 0.25',
        f'vllm:kv_cache_usage_perc{{{ENGINE},{label}="b"}} 0.75',
    )

    assert (engine.running, engine.kv_used_ratio) == (7, 0.5)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    engine = one(
        f'vllm:num_requests_running{{{ENGINE},ReplicaId="a"}} NaN',
        f'vllm:num_requests_running{{{ENGINE},ReplicaId="b"}} 4',
    )

    assert engine.running is None


def test_a_repeated_series_counts_once() -> None:
    assert one(RUNNING, RUNNING).running == 1


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e400", "9" * 400])
def test_a_value_that_cannot_be_is_absent(value: str) -> None:
    assert one(f"vllm:num_requests_running{{{ENGINE}}} {value}").running is None


def test_a_sum_beyond_all_numbers_is_absent() -> None:
    lines = [f'vllm:num_requests_running{{{ENGINE},ReplicaId="{replica}"}} 1.7e308' for replica in "ab"]

    assert one(*lines).running is None


@pytest.mark.parametrize("value", ["1.5", "100", "-1"])
def test_a_ratio_outside_0_and_1_is_absent(value: str) -> None:
    engine = one(f"vllm:kv_cache_usage_perc{{{ENGINE}}} {value}", f"vllm:gpu_prefix_cache_hit_rate{{{ENGINE}}} {value}")

    assert (engine.kv_used_ratio, engine.prefix_hit_lifetime_ratio) == (None, None)


def test_the_hit_rate_of_v0_is_a_ratio_of_its_lifetime() -> None:
    assert one('vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.5').prefix_hit_lifetime_ratio == 0.5


@pytest.mark.parametrize(("value", "awake"), [("1.0", True), ("0.0", False)])
def test_the_awake_series_tells_whether_it_sleeps(value: str, *, awake: bool) -> None:
    engine = one(
        f'vllm:engine_sleep_state{{{ENGINE},sleep_state="awake"}} {value}',
        f'vllm:engine_sleep_state{{{ENGINE},sleep_state="discard_all"}} 1.0',
    )

    assert engine.awake is awake


def test_without_the_awake_series_sleep_is_unknown() -> None:
    assert one(f'vllm:engine_sleep_state{{{ENGINE},sleep_state="discard_all"}} 1.0').awake is None


def test_engines_are_distinguished_by_model_and_rank() -> None:
    lines = [
        f'vllm:num_requests_running{{engine="{rank}",model_name="{model}"}} {rank}' for model in "ba" for rank in "10"
    ]

    assert [(engine.model_name, engine.engine, engine.running) for engine in read(*lines)] == [
        ("a", "0", 0),
        ("a", "1", 1),
        ("b", "0", 0),
        ("b", "1", 1),
    ]


@pytest.mark.parametrize("labels", ['model_name="m"', 'model_name="m",engine=""'])
def test_an_engine_without_rank_is_engine_0(labels: str) -> None:
    assert one(f"vllm:num_requests_running{{{labels}}} 1").engine == "0"


def test_the_start_of_the_process_is_that_of_every_engine() -> None:
    engines = read(
        "process_start_time_seconds 1.7e9",
        *(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 1' for rank in "01"),
    )

    assert [engine.started_at_seconds for engine in engines] == [1.7e9, 1.7e9]


def test_an_input_is_available_when_any_engine_has_a_value() -> None:
    page = parse_engines(f'{RUNNING}\nvllm:num_requests_running{{engine="1",model_name="m"}} NaN\n')

    assert isinstance(page, EnginePage)
    assert [name for name, is_available in page.inputs if is_available] == ["requests_running"]


@pytest.mark.parametrize("values", [("3", "4"), ("4", "3"), ("3", "NaN")])
def test_a_series_that_a_page_tells_twice_and_not_alike_is_unknown(values: tuple[str, ...]) -> None:
    """As where somebody joins the pages of a server and of another exporter, both with a start of their process."""
    started = [f"process_start_time_seconds {value}" for value in values]
    engine = one(f"vllm:num_requests_running{{{ENGINE}}} 3", f"vllm:num_requests_running{{{ENGINE}}} 3", *started)

    assert (engine.running, engine.started_at_seconds) == (3, None)
