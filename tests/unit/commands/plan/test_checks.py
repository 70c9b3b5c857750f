"""The checks of a start by release: which refuses what, in vLLM's words, and what fixes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.plan.asked import Answer, estimated, of, plan
from vllm_headroom_tools.sizing.assumptions import Range, add_independent
from vllm_headroom_tools.sizing.checks import CheckName, check_start, find_failed_check
from vllm_headroom_tools.sizing.releases import NEWEST_MINOR, OLDEST_MINOR, parse_release

Capsys = pytest.CaptureFixture[str]
HYBRID = "qwen3-next-80b-a3b"
ALL = {"0.29", "0.31", "0.32", "0.33"}


def ask(capsys: Capsys, *words: str) -> Answer:
    return plan(capsys, *words, "--json")


def options_of(answer: Answer) -> list[dict[str, str]]:
    return [change["settings"] for change in answer.document["changes"]]


def failed(name: str, release: str, **settings: Any) -> CheckName | None:
    check = find_failed_check(estimated(name, release=parse_release(release), **settings))
    return None if check is None else check.name


def test_checks_come_in_vllms_order() -> None:
    names = [check.name for check in check_start(estimated(HYBRID, card_gib=96, max_num_seqs=1024))]

    assert names == [name for name in CheckName if name in names]
    assert (
        names.index(CheckName.FREE_MEMORY)
        < names.index(CheckName.LONGEST_SEQUENCE)
        < names.index(CheckName.STATE_BLOCKS)
    )


@pytest.mark.parametrize("release", ["0.20", "0.21.1", "v0.33.0"])
def test_more_sequences_than_blocks_for_states_are_refused(capsys: Capsys, release: str) -> None:
    card = ("--gpu-memory", "96GiB", "-tp", "2", "--vllm-version", release)
    words = (*of(HYBRID), *card, "--max-model-len", "2048")
    answer = ask(capsys, *words, "--max-num-seqs", "2048")

    assert answer.status == 1
    assert 'vLLM: "max_num_seqs (2048) exceeds available Mamba cache blocks (at most ' in answer.headline
    fewer = next(change["--max-num-seqs"] for change in options_of(answer) if list(change) == ["--max-num-seqs"])
    assert {"--enforce-eager": ""} in options_of(answer)
    assert ask(capsys, *words, "--max-num-seqs", fewer).status == 0


def test_without_whole_graphs_or_before_the_check_they_are_accepted() -> None:
    many_requests = {"card_gib": 160, "max_num_seqs": 4096, "max_num_batched_tokens": 8192, "max_model_len": 2048}
    many_requests |= {"tensor_parallel_size": 2}

    assert failed(HYBRID, "0.33", **many_requests) in {None, CheckName.STATE_BLOCKS}
    assert failed(HYBRID, "0.33", **many_requests, enforce_eager=True) is None
    assert failed(HYBRID, "0.19", **many_requests) is None


@pytest.mark.parametrize(
    ("release", "prefixes", "expected"),
    [
        ("0.26", True, CheckName.ALIGNED_BLOCK),
        ("0.19", True, CheckName.ALIGNED_BLOCK),
        ("0.26", None, None),
        ("0.27", True, None),
        ("0.33", None, None),
    ],
)
def test_a_block_as_large_as_a_state_has_to_fit_into_a_batch(
    release: str,
    prefixes: bool | None,  # noqa: FBT001 - a case
    expected: CheckName | None,
) -> None:
    room = {"card_gib": 200, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 2048}

    assert failed(HYBRID, release, **room, enable_prefix_caching=prefixes) is expected


def test_a_larger_batch_fixes_it(capsys: Capsys) -> None:
    words = (*of(HYBRID), "--gpu-memory", "200GiB", "--max-num-seqs", "16", "--max-model-len", "2048")
    answer = ask(capsys, *words, "--max-num-batched-tokens", "128", "--vllm-version", "0.24", "--enable-prefix-caching")

    block_tokens = answer.document["block_size"]
    assert f"block_size ({block_tokens}) must be <= max_num_batched_tokens (128)" in answer.headline
    assert {"--max-num-batched-tokens": str(block_tokens)} in options_of(answer)


def test_states_of_prefixes_make_a_sequence_larger() -> None:
    assert estimated(HYBRID, release=parse_release("0.33")).layout.state_blocks == 2 * (
        estimated(HYBRID, release=parse_release("0.26")).layout.state_blocks
    )


def test_a_length_beyond_the_models_own_is_refused(capsys: Capsys, tmp_path: Path) -> None:
    """As phi-2 was refused in a recorded start."""
    config = json.loads(Path(of("llama-3.1-8b")[1]).read_text())
    config |= {"max_position_embeddings": 2048, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = ask(capsys, "--model-config", str(tmp_path), "--gpu", "H100", "--max-model-len", "8192")

    assert answer.status == 1
    assert "User-specified max_model_len (8192) is greater than the derived max_model_len (2048)" in answer.headline
    assert {"--max-model-len": "2048"} in options_of(answer)


def test_a_share_that_is_not_free_is_refused_and_a_smaller_one_proposed(capsys: Capsys) -> None:
    answer = ask(capsys, *of("llama-3.1-8b"), "--gpu", "H100", "-tp", "2", "--gpu-memory-utilization", "0.99")

    assert answer.status == 1
    assert "Free memory on device cuda:0 (77.80/79.20 GiB) on startup is less than desired" in answer.headline
    assert {"--gpu-memory-utilization": "0.95"} in options_of(answer)


def test_weights_that_no_card_holds_are_no_matter_of_the_budget() -> None:
    assert failed("llama-3.1-70b", "0.33") is CheckName.WEIGHTS
    assert failed("llama-3.1-8b", "0.33", card_gib=24, gpu_memory_utilization=0.5) is CheckName.CACHE_BLOCKS


def test_a_release_that_is_not_known_is_bad_input(capsys: Capsys) -> None:
    for text in (f"0.{NEWEST_MINOR + 1}", f"0.{OLDEST_MINOR - 1}", "1.0", "newest"):
        answer = plan(capsys, *of("llama-3.1-8b"), "--vllm-version", text)
        assert answer.status == 2
        assert f"accepts a release from 0.{OLDEST_MINOR} to 0.{NEWEST_MINOR}" in answer.err


SMALL_CARD = ("--gpu", "RTX 4090", "--max-model-len", "8192")


def test_a_set_cache_that_leaves_no_room_for_the_sampler_is_refused_in_vllms_words(capsys: Capsys) -> None:
    words = (*of("qwen3-8b"), *SMALL_CARD, "--kv-cache-memory-bytes", "6GiB", "--vllm-version", "0.19")
    answer = ask(capsys, *words, "--max-num-seqs", "1024")

    assert answer.status == 1
    assert "when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`" in answer.headline
    fewer = next(change["--max-num-seqs"] for change in options_of(answer) if list(change) == ["--max-num-seqs"])
    assert ask(capsys, *words, "--max-num-seqs", fewer).status == 0


def check_sampler(release: str, share: float, sequences: int = 1024) -> bool | None:
    settings = {"gpu_memory_utilization": share, "max_num_seqs": sequences, "max_num_batched_tokens": 8192}
    checks = check_start(estimated("qwen3-8b", card_gib=79.19, release=parse_release(release), **settings))
    return next(check.passes for check in checks if check.name is CheckName.SAMPLER_WARMUP)


def test_the_second_runners_warm_up_takes_more_than_its_profile_before_0_33() -> None:
    assert check_sampler("0.31", 0.98) is None
    assert check_sampler("0.31", 0.98, 128) is True
    assert check_sampler("0.31", 0.92) is True
    assert check_sampler("0.19", 0.95) is True
    assert check_sampler("0.21", 0.98) is True
    assert check_sampler("0.33", 0.98) is True


def read_graphs_gib(**settings: Any) -> tuple[float, float]:
    graphs = estimated("llama-3.1-8b", release=parse_release("0.21"), **settings).graphs
    return graphs.low / 2**30, graphs.high / 2**30


def test_whole_graphs_are_captured_up_to_max_num_seqs_and_those_of_parts_up_to_twice() -> None:
    few = read_graphs_gib(max_num_seqs=256)
    graphs_512 = read_graphs_gib(max_num_seqs=512)
    speculating = read_graphs_gib(max_num_seqs=256, has_speculation=True)

    # Both have 51 graphs of parts; 16 of the whole model are for 272 to 512 sequences.
    assert graphs_512[1] - few[1] == pytest.approx(16 * 32 * 0.225 / 1024)
    assert speculating == graphs_512


def test_only_hopper_has_the_buffer_of_flash_attention_3() -> None:
    hopper, ada = read_graphs_gib(card_name="H100"), read_graphs_gib(card_name="RTX 4090")

    assert hopper[1] - ada[1] == pytest.approx(0.1)
    assert read_graphs_gib() == hopper


def test_a_cards_own_reserve_makes_the_budget_less_uncertain() -> None:
    def read_uncertain_gib(card_name: str | None) -> float:
        reserved = estimated("llama-3.1-8b", card_gib=95.59, card_name=card_name).assumptions.driver_reserved
        return (reserved.range.high - reserved.range.low) / 2**30

    assert read_uncertain_gib("RTX PRO 6000") == pytest.approx(0.15)
    assert read_uncertain_gib(None) >= 0.5


def test_repacked_weights_leave_gaps_where_consumed_memory_counts() -> None:
    def read_gap_gib(name: str, release: str) -> float:
        estimate = estimated(name, release=parse_release(release))
        plain = estimated("qwen2.5-7b", release=parse_release(release))
        return (estimate.other_overhead.high - plain.other_overhead.high) / 2**30

    layer_gib = (5.2 - 2.03) / 28
    assert read_gap_gib("qwen2.5-7b-awq", "0.27") == pytest.approx(2 * layer_gib, rel=0.05)
    assert read_gap_gib("qwen2.5-7b-awq", "0.21") == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "releases"),
    [
        ("llama-3.1-8b", {"0.23", "0.26", "0.28", "0.30"}),
        ("qwen3-8b", {"0.22", "0.23", "0.26", "0.28", "0.30"}),
        ("mixtral-8x7b", {"0.30"}),
        (HYBRID, {"0.30"}),
    ],
)
def test_which_model_runner_serves_depends_on_model_and_release(name: str, releases: set[str]) -> None:
    second = {
        release
        for release in ("0.21", "0.22", "0.23", "0.26", "0.28", "0.30")
        if estimated(name, release=parse_release(release)).question.may_have_second_runner
    }

    assert second == releases


@pytest.mark.parametrize(("method", "releases"), [("ngram", {"0.32", "0.33"}), ("medusa", {"0.33"}), ("mtp", ALL)])
def test_some_ways_to_speculate_need_the_first_model_runner(method: str, releases: set[str]) -> None:
    second = {
        release
        for release in ALL
        if estimated(release=parse_release(release), speculation_method=method).question.has_only_second_runner
    }

    assert second == releases


def test_a_sum_of_uncertain_parts_hardly_ever_has_all_their_upper_bounds() -> None:
    part = Range(low=1.0, high=2.0)

    assert add_independent([part]) == part
    assert add_independent([part, Range(low=3.0, high=3.0)]) == Range(low=4.0, high=5.0)
    assert add_independent([part] * 12) == Range(low=12.0, high=18 + 2.05)


@pytest.mark.parametrize(
    ("options", "refusal", "change"),
    [
        (("-tp", "4"), "World size (4) is larger than the number of available GPUs (2)", "--tensor-parallel-size"),
        (("-dp", "3"), "DP adjusted local rank 2 is out of bounds", "--data-parallel-size"),
    ],
)
def test_more_ranks_than_cards_are_refused(capsys: Capsys, options: tuple[str, ...], refusal: str, change: str) -> None:
    answer = ask(capsys, *of("llama-3.1-8b"), "--gpu", "2xH100", *options)

    assert answer.status == 1
    assert refusal in answer.headline
    assert {change: "2"} in options_of(answer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_machines_with_unified_memory_have_all_upper_bounds_at_once(ranks: int) -> None:
    """Two of them had 7 to 9 GiB of communication and 5.1 of CUDA graphs; one had 14.6 of at most 15.6 GiB."""
    release = parse_release("0.29")
    estimate = estimated(card_gib=119.7, unified_memory=True, tensor_parallel_size=ranks, release=release)

    assert estimate.overhead is not None
    assert estimate.activations is not None
    assert estimate.overhead.high == sum(
        part.high for part in (estimate.activations, *estimate.other_parts, estimate.graphs)
    )


def test_engines_without_shared_experts_do_not_communicate() -> None:
    """A recorded start of two engines had 0.51 GiB missing on each GPU, as one engine has."""
    alone = estimated(card_gib=80).assumptions.missing_at_start.range

    assert estimated(card_gib=80, data_parallel_size=2).assumptions.missing_at_start.range == alone
    assert estimated(card_gib=80, tensor_parallel_size=2).assumptions.missing_at_start.range.low > alone.high
