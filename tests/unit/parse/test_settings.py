from __future__ import annotations

import pytest

from tests.unit.parse.pages import RUNNING, info, one, read
from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines


def test_settings_reach_every_model_of_their_engine() -> None:
    engines = read(
        *(f'vllm:num_requests_running{{engine="{rank}",model_name="{model}"}} 1' for model in "ab" for rank in "01"),
        info('engine="0"', gpu_memory_utilization="0.8"),
        info('engine="1"', gpu_memory_utilization="0.7"),
    )

    assert [(e.model_name, e.engine, e.gpu_memory_utilization_ratio) for e in engines] == [
        ("a", "0", 0.8),
        ("a", "1", 0.7),
        ("b", "0", 0.8),
        ("b", "1", 0.7),
    ]


def test_settings_without_rank_reach_every_engine() -> None:
    engines = read(
        *(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 1' for rank in "01"),
        info("", gpu_memory_utilization="0.8"),
    )

    assert [engine.gpu_memory_utilization_ratio for engine in engines] == [0.8, 0.8]


def test_settings_alone_make_an_engine_without_a_model_name() -> None:
    engine = one("process_start_time_seconds 5", info("", gpu_memory_utilization="0.9"))

    assert (engine.model_name, engine.engine) == ("", "0")
    assert (engine.gpu_memory_utilization_ratio, engine.started_at_seconds) == (0.9, 5.0)


def test_settings_alone_of_a_later_rank_make_only_that_engine() -> None:
    engine = one("process_start_time_seconds 5", info('engine="3"', num_gpu_blocks="10", block_size="16"))

    assert (engine.engine, engine.kv_capacity_tokens) == ("3", 160)


def test_capacity_is_the_number_of_tokens_where_vllm_tells_it() -> None:
    engine = one(RUNNING, info(kv_cache_size_tokens="1000", num_gpu_blocks="10", block_size="16"))

    assert engine.kv_capacity_tokens == 1000


@pytest.mark.parametrize("tokens", ["None", "0", "nan", "-5", ""])
def test_capacity_is_blocks_times_their_size_where_the_number_of_tokens_says_nothing(tokens: str) -> None:
    engine = one(RUNNING, info(kv_cache_size_tokens=tokens, num_gpu_blocks="10", block_size="16"))

    assert engine.kv_capacity_tokens == 160


@pytest.mark.parametrize(
    ("model", "capacity"),
    [
        ("google/gemma-3-27b-it", None),
        ("gemma2:9b", None),
        ("unsloth/gpt-oss-20b-BF16", None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", None),
        ("/models/Qwen3.5-27B", None),
        ("google/gemma-2-2b-it", None),
        ("nvidia/Nemotron-H-8B-Base-8K", None),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
        ("google/gemma-7b", 255_952),
        ("meta-llama/Llama-3.1-8B", 255_952),
        ("Qwen/Qwen3-32B", 255_952),
        ("Qwen/Qwen3-8B", 255_952),
        ("google/gemma-2b-it", 255_952),
        ("acme/Llama-40B", 255_952),
        ("RedHatAI/Llama-4bit", 255_952),
        ("deepseek-ai/DeepSeek-V3", 255_952),
    ],
)
def test_blocks_are_no_capacity_where_layers_form_groups(model: str, capacity: int | None) -> None:
    running = f'vllm:num_requests_running{{engine="0",model_name="{model}"}} 4'
    engine = one(running, info(num_gpu_blocks="15997", block_size="16"))
    newer = one(running, info(kv_cache_size_tokens="36560", num_gpu_blocks="15997", block_size="16"))

    assert engine.kv_capacity_tokens == capacity
    assert newer.kv_capacity_tokens == 36560


def test_a_page_tells_whether_its_capacity_is_of_blocks() -> None:
    blocks = info(num_gpu_blocks="15997", block_size="16")
    counted = parse_engines(f"{RUNNING}\n{blocks}\n")
    reported = parse_engines(f"{RUNNING}\n{info(kv_cache_size_tokens='36560', num_gpu_blocks='15997')}\n")

    assert isinstance(counted, EnginePage)
    assert isinstance(reported, EnginePage)
    assert (counted.has_capacity_of_blocks, reported.has_capacity_of_blocks) == (True, False)


@pytest.mark.parametrize(("text", "capacity"), [("528", None), ("None", 160)])
def test_blocks_are_no_capacity_where_layers_keep_a_state(text: str, capacity: int | None) -> None:
    engine = one(RUNNING, info(num_gpu_blocks="10", block_size="16", mamba_block_size=text))

    assert engine.kv_capacity_tokens == capacity


def test_blocks_are_shared_among_the_engines_that_all_repeat_their_sum() -> None:
    engines = read(
        *(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 1' for rank in "01"),
        *(info(f'engine="{rank}"', num_gpu_blocks="20", block_size="16") for rank in "01"),
    )

    assert [engine.kv_capacity_tokens for engine in engines] == [160, 160]


def test_capacities_of_replicas_add_up() -> None:
    engine = one(
        RUNNING,
        *(info(num_gpu_blocks="10", block_size="16", ReplicaId=replica, WorkerId=replica) for replica in "ab"),
    )

    assert engine.kv_capacity_tokens == 320


def test_settings_repeated_by_several_api_servers_count_once() -> None:
    engine = one(RUNNING, *(info(num_gpu_blocks="10", block_size="16", pid=pid) for pid in "12"))

    assert engine.kv_capacity_tokens == 160


def test_settings_that_api_servers_tell_differently_count_once() -> None:
    engine = one(RUNNING, *(info(kv_cache_size_tokens="100", kv_cache_layout=layout) for layout in ("None", "NHD")))

    assert engine.kv_capacity_tokens == 100


def test_a_capacity_beyond_all_numbers_is_unknown() -> None:
    assert one(RUNNING, info(num_gpu_blocks="1e200", block_size="1e200")).kv_capacity_tokens is None


@pytest.mark.parametrize("blocks", [{}, {"num_gpu_blocks": "None"}, {"num_gpu_blocks": "10", "block_size": "None"}])
def test_capacity_is_unknown_without_blocks_or_their_size(blocks: dict[str, str]) -> None:
    assert one(RUNNING, info(**{"block_size": "16"} | blocks)).kv_capacity_tokens is (None)


@pytest.mark.parametrize(("text", "ratio"), [("0.92", 0.92), ("1", 1.0), ("0", None), ("1.1", None), ("None", None)])
def test_gpu_memory_utilization_is_above_0_and_at_most_1(text: str, ratio: float | None) -> None:
    assert one(RUNNING, info(gpu_memory_utilization=text)).gpu_memory_utilization_ratio == ratio


def test_replicas_that_disagree_on_a_setting_leave_it_unknown() -> None:
    engine = one(RUNNING, *(info(gpu_memory_utilization=f"0.{r}", ReplicaId=r) for r in "89"))

    assert engine.gpu_memory_utilization_ratio is None


@pytest.mark.parametrize(("text", "size"), [("1073741824", 1073741824), ("None", None), ("0", None)])
def test_the_size_of_the_kv_cache_is_known_where_it_was_asked_for(text: str, size: float | None) -> None:
    assert one(RUNNING, info(kv_cache_memory_bytes=text)).kv_cache_memory_bytes == size
