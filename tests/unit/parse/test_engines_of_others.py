"""What a table can express besides names: units, sums of families and of label values, totals among parts."""

from __future__ import annotations

from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom.parse.engines import explain_empty_page, parse_engines
from vllm_headroom.parse.profiles import PROFILES

SGLANG = 'model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"'


def one(page: str) -> EngineReading:
    read = parse_engines(page)
    assert isinstance(read, EnginePage)
    [engine] = read.engines
    return engine


def test_a_unit_is_turned_into_bytes_and_families_are_added_up() -> None:
    page = (
        f"sglang:weight_memory_usage_gb{{{SGLANG}}} 14.5\n"
        f"sglang:kv_cache_memory_usage_gb{{{SGLANG}}} 40.25\n"
        f'sglang:graph_memory_usage_gb{{{SGLANG},phase="decode"}} 0.5\n'
        f'sglang:graph_memory_usage_gb{{{SGLANG},phase="prefill"}} 0.25\n'
    )

    assert one(page).memory_bytes == (14.5 + 40.25 + 0.75) * 2**30


def test_a_sum_without_one_of_its_parts_is_not_known() -> None:
    assert (
        one(f"sglang:num_running_reqs{{{SGLANG}}} 1\nsglang:weight_memory_usage_gb{{{SGLANG}}} 14\n").memory_bytes
        is None
    )


def test_ranks_repeat_what_one_of_them_says() -> None:
    other_rank = SGLANG.replace('tp_rank="0"', 'tp_rank="1"')

    assert one(f"sglang:num_running_reqs{{{SGLANG}}} 3\nsglang:num_running_reqs{{{other_rank}}} 3\n").running == 3


def test_data_parallel_ranks_are_engines() -> None:
    page = parse_engines(
        "".join(f'sglang:num_running_reqs{{{SGLANG},dp_rank="{rank}"}} {rank + 1}\n' for rank in range(2))
    )

    assert isinstance(page, EnginePage)
    assert [(engine.engine, engine.running) for engine in page.engines] == [("0", 1), ("1", 2)]


def test_parts_of_a_total_are_not_added_to_it() -> None:
    page = "".join(
        f'sglang:num_queue_reqs{{{SGLANG},priority="{priority}"}} {count}\n'
        for priority, count in (("", 5), ("0", 2), ("7", 3))
    )

    assert one(page).waiting == 5


def test_chosen_label_values_are_summed() -> None:
    page = "".join(
        f'sglang:prefill_effective_tokens_total{{{SGLANG},mode="{mode}"}} {count}\n'
        for mode, count in (("input", 100), ("device_hit", 30), ("host_hit", 8), ("storage_hit", 2), ("other", 999))
    )

    assert (one(page).prefix_queries_total, one(page).prefix_hits_total) == (140, 40)


def test_an_older_page_counts_its_prefix_cache_elsewhere() -> None:
    page = (
        f'sglang:prompt_tokens_total{{{SGLANG},is_streaming="True"}} 100\n'
        f'sglang:cached_tokens_total{{{SGLANG},cache_source="device"}} 25\n'
    )

    assert (one(page).prefix_queries_total, one(page).prefix_hits_total) == (100, 25)


def test_used_tokens_of_a_capacity_are_a_ratio() -> None:
    engine = one("tgi_batch_current_max_tokens 4096\ntgi_batch_max_total_tokens 16384\n")

    assert (engine.kv_used_ratio, engine.kv_capacity_tokens) == (0.25, 16384)
    assert one("tgi_batch_current_max_tokens 4096\n").kv_used_ratio is None


def test_a_page_that_never_names_a_model_is_one_engine_of_its_profiles_name() -> None:
    engine = one(
        "llamacpp:requests_processing 2\nllamacpp:prompt_tokens_total 7\nllamacpp:prompt_tokens_cached_total 3\n"
    )

    assert (engine.model_name, engine.engine, engine.running, engine.prompt_tokens_total) == ("llama_cpp", "0", 2, 10)


def test_the_engine_that_dynamo_runs_tells_more_than_dynamo() -> None:
    own = 'dynamo_component_gpu_cache_usage_percent{model="m"} 0.5\n'
    read, alone = parse_engines(own + 'vllm:num_requests_running{model_name="m",engine="0"} 4\n'), parse_engines(own)

    assert isinstance(read, EnginePage)
    assert isinstance(alone, EnginePage)
    assert (read.profile, alone.profile) == ("vllm", "dynamo")


def test_a_profile_can_be_forced() -> None:
    page = "vllm:num_requests_running 4\nsglang:num_running_reqs 3\n"
    forced, absent = parse_engines(page, "sglang"), parse_engines(page, "tgi")

    assert isinstance(forced, EnginePage)
    assert isinstance(absent, EnginePage)
    assert (forced.profile, forced.engines[0].running) == ("sglang", 3)
    assert (absent.profile, absent.engines) == ("tgi", ())


def test_what_was_looked_for_is_reported_with_what_makes_the_engine_tell_it() -> None:
    unknown, forced = parse_engines("node_load1 0.5\n"), parse_engines("node_load1 0.5\n", "tensorrt_llm")

    assert isinstance(unknown, EnginePage)
    assert isinstance(forced, EnginePage)
    for profile in PROFILES:
        assert (
            f"{profile.product} ({' '.join(profile.prefixes)}; {profile.path}, {profile.switch})"
            in explain_empty_page(unknown)
        )
    assert "docs/engines.md" in explain_empty_page(unknown)
    assert "Looked for TensorRT-LLM (trtllm_; /prometheus/metrics, with return_perf" in explain_empty_page(forced)
    assert "vLLM (" not in explain_empty_page(forced)
