"""The command `plan`: its words, its JSON and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Golden
from tests.unit.commands.plan.asked import of, plan
from tests.unit.sizing.models import config_text
from vllm_headroom.units import GIB

Capsys = pytest.CaptureFixture[str]
EXPECTED = Path(__file__).parent / "expected"
CASES = {
    "llama-3.1-70b-on-4-gpus": (
        *of("llama-3.1-70b"),
        *("--gpu-memory", "80GiB", "--tensor-parallel-size", "4", "--max-model-len", "32768", "--max-num-seqs", "64"),
    ),
    "llama-3.1-70b-does-not-fit": (*of("llama-3.1-70b"), "--gpu-memory", "80GiB", "--max-model-len", "8192"),
    "gemma-3-27b-too-close-to-call": (*of("gemma-3-27b-it"), "--gpu-memory", "80GiB"),
    "qwen3-next-with-a-state": (*of("qwen3-next-80b-a3b"), "--gpu-memory", "80GiB", "--tensor-parallel-size", "4"),
    "deepseek-v3-on-8-gpus": (*of("deepseek-v3"), "--gpu-memory", "141GiB", "--tensor-parallel-size", "8"),
    "nothing-but-the-cache": ("--layers", "80", "--kv-heads", "8", "--head-size", "128"),
}
STATUSES = dict(zip(CASES, (0, 1, 2, 0, 0, 2), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_words_are_as_expected(case: str, capsys: Capsys, golden: Golden) -> None:
    answer = plan(capsys, *CASES[case])

    assert (answer.status, answer.err) == (STATUSES[case], "")
    golden(EXPECTED / f"{case}.txt", answer.out)
    assert max(map(len, answer.out.splitlines())) <= 120


@pytest.mark.parametrize("case", CASES)
def test_json_says_the_same_in_one_object(case: str, capsys: Capsys) -> None:
    answer = plan(capsys, *CASES[case], "--json")

    assert answer.status == STATUSES[case]
    assert {"bytes_per_token", "bytes_per_block", "kv_capacity_tokens", "weights_bytes", "fits"} <= set(answer.document)
    assert {0: True, 1: False, 2: None}[answer.status] is answer.document["fits"]


def test_the_reference_figures_of_llama_70b(capsys: Capsys) -> None:
    words = (*of("llama-3.1-70b"), "--gpu-memory", "320GB", "--max-model-len", "4096", "--max-num-seqs", "64", "--json")
    planned = plan(capsys, *words).document

    assert planned["bytes_per_token"] == planned["bytes_per_token_all_gpus"] == 327_680
    assert planned["bytes_per_block"] == 5_242_880
    assert planned["all_at_once_blocks"] == 16_384
    assert planned["all_at_once_bytes"] == 80 * GIB
    assert planned["weights_bytes"] == 2 * (70_552_387_584 + 131_072 * 128)  # with the table of positions
    assert planned["fits"] is True


def test_the_tiny_model_has_the_tokens_that_vllm_reports_of_a_gibibyte(capsys: Capsys) -> None:
    planned = plan(capsys, *of("tiny"), "--gpu-memory", "8GiB", "--kv-cache-memory-bytes", "1GiB", "--json").document

    assert (planned["bytes_per_token"], planned["kv_capacity_tokens"], planned["fits"]) == (512, 2_097_152, True)


def test_flags_say_what_a_file_says(capsys: Capsys) -> None:
    sizes = "--layers 80 --kv-heads 8 --head-size 128 --hidden-size 8192 --vocabulary 128256 --parameters 70.55B"
    card = ("--gpu-memory", "192GiB", "--max-model-len", "8192", "--json")

    by_flags = plan(capsys, *sizes.split(), *card)
    by_file = plan(capsys, *of("llama-3.1-70b"), *card)

    assert (by_flags.status, by_file.status) == (0, 0)
    assert by_flags.document["bytes_per_token"] == by_file.document["bytes_per_token"]
    assert by_flags.document["weights_bytes"] == pytest.approx(by_file.document["weights_bytes"], rel=1e-3)


def test_vllms_own_spellings_are_taken(capsys: Capsys) -> None:
    ours = ("--tensor-parallel-size", "2", "--max-model-len", "32000", "--kv-cache-memory-bytes", "1GiB")
    theirs = ("-tp", "2", "--max_model_len=32k", "--kv_cache_memory_bytes", "1G")
    card = ("--gpu-memory", "80GiB", "--json")

    assert plan(capsys, *of("llama-3.1-8b"), *card, *theirs) == plan(capsys, *of("llama-3.1-8b"), *card, *ours)
    assert plan(capsys, *of("llama-3.1-8b"), *card, "--max-model-len=32K").document["max_model_len"] == 32768


@pytest.mark.parametrize("longest", ["auto", "-1"])
def test_a_length_of_auto_is_the_most_that_fit(longest: str, capsys: Capsys) -> None:
    card = (*of("llama-3.1-8b"), "--gpu-memory", "24GiB", "--json")
    largest_length = plan(capsys, *card).document["largest_max_model_len"][0]["max_model_len"]

    planned = plan(capsys, *card, "--max-model-len", longest)

    assert 0 < planned.document["max_model_len"] == largest_length < 131_072
    assert planned.document["fits"] is True


def test_every_mistake_is_reported_at_once(capsys: Capsys) -> None:
    answer = plan(capsys, "--gpu-memory", "80", "--layers", "x", "--colour", "--max-model-len", "--dtyp=half")

    assert (answer.status, answer.out) == (2, "")
    assert [line.split(":")[1] for line in answer.err.splitlines()] == [
        *(" --colour", " --max-model-len", " --dtyp", " --gpu-memory", " --layers")
    ]


def test_flags_beat_the_file(capsys: Capsys) -> None:
    planned = plan(capsys, *of("falcon-7b"), "--kv-heads", "8", "--layers", "10", "--json").document

    assert planned["bytes_per_token"] == 10 * 8 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("flags", "bytes_per_token", "weights_bytes"),
    [
        ((), 131_072, 16_093_544_448),
        (("--kv-cache-dtype", "fp8"), 65_536, 16_093_544_448),
        (("--dtype", "float32"), 262_144, 32_187_088_896),
        (("--quantization", "fp8"), 131_072, 9_114_222_592),
        (("--parameters", "8030000000"), 131_072, 16_093_554_432),
        (("--tensor-parallel-size", "2"), 65_536, 8_063_549_440),
    ],
)
def test_dtypes_and_sizes_count(
    flags: tuple[str, ...], bytes_per_token: int, weights_bytes: int, capsys: Capsys
) -> None:
    planned = plan(capsys, *of("llama-3.1-8b"), *flags, "--json").document

    assert (planned["bytes_per_token"], planned["weights_bytes"]) == (bytes_per_token, weights_bytes)


def test_a_checkpoint_of_an_fp8_cache_needs_no_flag_for_it(capsys: Capsys) -> None:
    assert plan(capsys, *of("llama-3.1-70b-fp8-kv"), "--json").document["bytes_per_token"] == 163_840


def test_windows_make_bytes_per_token_an_upper_bound_and_it_is_said(capsys: Capsys) -> None:
    windowed = plan(capsys, *of("mistral-7b-v0.1"), "--gpu-memory", "24GiB")
    plain = plan(capsys, *of("llama-3.1-8b"), "--gpu-memory", "24GiB")

    assert "bytes per token are an upper bound" in " ".join(windowed.out.split())
    assert "upper bound" not in plain.out
    assert plan(capsys, *of("mistral-7b-v0.1"), "--json").document["bytes_per_token_is_upper_bound"] is True


def test_kv_heads_are_repeated_when_there_are_more_gpus(capsys: Capsys) -> None:
    words = (*of("qwen2.5-7b"), "--tensor-parallel-size", "28")

    assert plan(capsys, *words, "--json").document["bytes_per_token"] == 28 * 2 * 128 * 2
    assert "28 GPUs share 4 KV heads: each is kept 7 times." in plan(capsys, *words).out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "needs --model or --model-config, or without them --layers, --kv-heads, --head-size\n"),
        (
            ("--gpu", "H100", "vllm", "serve", "org/m"),
            "--gpu: got 4 words, accepts one: put a value with spaces in quotes; a whole line comes after --",
        ),
        (("--layers", "2"), "missing: --kv-heads, --head-size"),
        ((*of("llama-3.1-70b"), "--tensor-parallel-size", "3"), "does not divide the model's 64 attention heads"),
        (("--model-config", "/nonexistent/config.json"), "it cannot be read: No such file or directory"),
        (("--model-config", "a" * 5000), "it cannot be read: File name too long"),
        (("--model", "a" * 5000), "not a model that is known here"),
        (("--model-config", "/nonexistent\nor not"), "it cannot be read: No such file or directory"),
        (("--model-config", __file__), "it is not JSON"),
        (
            (*of("tiny"), "--gpu-memory", "much"),
            "got 'much', accepts a size such as 81559MiB, or a number of bytes from 1 MiB on",
        ),
        ((*of("tiny"), "--gpu-memory", "80"), "got '80' (without a unit it is bytes: 80GiB?), accepts a size"),
        (
            (*of("tiny"), "--kv-cache-memory-bytes", "1.5G"),
            "got '1.5G', accepts a size such as 20GiB, or as vLLM takes",
        ),
        (
            (*of("tiny"), "--gpu-memory", "0"),
            "got '0', accepts a size such as 81559MiB, or a number of bytes from 1 MiB on",
        ),
        ((*of("tiny"), "--gpu-memory-utilization", "92"), "got '92' (it is a ratio: 0.92 or 92%?), accepts a ratio"),
        ((*of("tiny"), "--gpu-memory-utilization", "101%"), "got '101%', accepts a ratio above 0, at most 1"),
        ((*of("tiny"), "--gpu-memory-utilization", "0.9_0"), "got '0.9_0', accepts a ratio above 0, at most 1"),
        ((*of("tiny"), "--gpu-memory-utilization", "nan"), "got 'nan', accepts a ratio above 0, at most 1"),
        ((*of("tiny"), "--max-num-seqs", "-1"), "got '-1', accepts a whole number from 1 to 16777216"),
        ((*of("tiny"), "--parameters", "many"), "got 'many', accepts a number of parameters, such as 70600000000"),
        (
            (*of("tiny"), "--kv-cache-dtype", "fp9"),
            "--kv-cache-dtype: got 'fp9' (did you mean fp8?), accepts auto, ",
        ),
        (
            (*of("tiny"), "--gpu", "80GiB"),
            "--gpu: got '80GiB' (80GiB: not a card that is known here; else --gpu-memory",
        ),
        ((*of("tiny"), "--gpu", "A100"), "got 'A100' (there are A100-40GB and A100-80GB), accepts a card"),
        ((*of("tiny"), "--gpus", "H100"), "not an option of plan or of vLLM 0.19 to 0.33, did you mean --gpu?"),
        ((*of("tiny"), "--hf-overrides", "[1]"), "got '[1]', accepts a JSON object"),
        (
            ("--model", "Qwen/Qwen3-33B"),
            "not a model that is known here, did you mean Qwen/Qwen3-32B?; else --model-config",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: tuple[str, ...], problem: str, capsys: Capsys) -> None:
    answer = plan(capsys, *words)

    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("vllm-headroom plan: ")
    assert problem in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("text", ["80G", "80Gb", "80 g"])
def test_a_size_with_two_meanings_gets_a_hint_what_to_type(text: str, capsys: Capsys) -> None:
    answer = plan(capsys, *of("tiny"), "--gpu-memory", text)

    assert (answer.status, answer.out) == (2, "")
    assert "has two meanings: 80GiB or 80GB?), accepts a size such as 81559MiB" in answer.err


@pytest.mark.parametrize("text", ["80GB", "80 GB"])
def test_decimal_units_of_a_card_are_noted(text: str, capsys: Capsys) -> None:
    answer = plan(capsys, *of("tiny"), "--gpu-memory", text)

    assert "80 GB are 74.51 GiB. A card sold with 80 GB has more" in " ".join(answer.out.split())
    assert "has more" not in plan(capsys, *of("tiny"), "--gpu-memory", "80GiB").out


def test_a_percentage_is_a_ratio(capsys: Capsys) -> None:
    card = (*of("llama-3.1-8b"), "--gpu", "H100", "--json", "--gpu-memory-utilization")

    assert plan(capsys, *card, "90%").out == plan(capsys, *card, "0.9").out


def test_named_cards_have_their_memory_and_are_all_used(capsys: Capsys) -> None:
    by_name = plan(capsys, *of("llama-3.1-70b"), "--gpu", "4xH100", "--json")
    by_size = plan(capsys, *of("llama-3.1-70b"), "--gpu-memory", "81559MiB", "-tp", "4", "--json")

    assert by_name.status == 0
    # Only with a number of cards the ranks are compared with it.
    assert by_name.document["checks"][1:] == by_size.document["checks"]
    assert {**by_name.document, "checks": []} == {**by_size.document, "checks": []}


def test_a_public_model_needs_no_file(capsys: Capsys) -> None:
    answer = plan(capsys, "--model", "Qwen/Qwen3-32B", "--gpu", "H100", "-tp", "2", "--json")

    # 64 layers x 8 KV heads x 2 x 128 values x 2 bytes, on 2 GPUs; 32.8 billion parameters.
    assert (answer.status, answer.document["bytes_per_token"]) == (0, 131_072)
    assert answer.document["weights_bytes"] * 2 == pytest.approx(65.5e9, rel=0.005)


def test_decode_context_parallelism_multiplies_the_tokens(capsys: Capsys) -> None:
    words = ("--model", "deepseek-ai/DeepSeek-R1", "--gpu", "8xH200", "--json")
    plain = plan(capsys, *words).document
    shared = plan(capsys, *words, "-dcp", "8").document

    assert shared["kv_capacity_tokens"] == 8 * plain["kv_capacity_tokens"]
    assert plan(capsys, *of("llama-3.1-8b"), "-tp", "8", "-dcp", "2").status == 2
    assert "which it has to divide" in plan(capsys, *of("llama-3.1-8b"), "-tp", "8", "-dcp", "2").err


def test_a_speculative_head_and_a_draft_take_memory(capsys: Capsys) -> None:
    card = (*of("llama-3.1-70b"), "--gpu", "4xH100", "--json")
    plain = plan(capsys, *card).document

    drafted = plan(capsys, *card, "-sc", json.dumps({"model": "meta-llama/Llama-3.1-8B-Instruct"})).document
    looked_up = plan(capsys, *card, "--speculative-config", '{"method": "ngram"}').document
    foreign = plan(capsys, *card, "--speculative-config.model", "acme/draft-of-llama", "--spec-tokens", "3")
    head = plan(
        capsys, *card, "-sc", '{"method": "eagle3", "model": "acme/head", "num_speculative_tokens": 3}'
    ).document

    # 32 layers x 8 KV heads x 2 x 128 values x 2 bytes, on 4 GPUs, and 8.03 billion parameters.
    assert drafted["bytes_per_token"] - plain["bytes_per_token"] == 32_768
    assert drafted["weights_bytes"] - plain["weights_bytes"] == pytest.approx(16.06e9 / 4, rel=0.001)
    assert looked_up["weights_bytes"] == plain["weights_bytes"]
    # An unknown head: one layer more, and an output matrix of 128,256 x 8,192.
    assert head["bytes_per_token"] * 80 == plain["bytes_per_token"] * 81
    assert head["weights_bytes"] - plain["weights_bytes"] > 128_256 * 8_192 * 2 / 4
    assert any("acme/head is not known here" in note for note in head["notes"])
    assert foreign.status == 2
    assert "missing: the size of the draft model" in foreign.headline


LARGE = ("--model", "moonshotai/Kimi-K2.5", "--gpu", "8xH200", "--vllm-version", "0.32", "--json")


@pytest.mark.parametrize(
    ("config", "layers", "gib"),
    [
        ('{"method": "ngram_gpu"}', 61, 0),
        ('{"method": "suffix"}', 61, 0),
        ('{"model": "mine.MyProposer"}', 61, 0),
        # A dense layer, three projections, and an output matrix of 163,840 x 7,168.
        ('{"method": "eagle3", "model": "acme/head"}', 62, 3.6 / 8),
        ('{"method": "dflash", "model": "acme/head"}', 69, 11.7 / 8),
        # For each token a matrix of 7,168 x 7,168 and an output matrix.
        ('{"model": "acme/medusa", "num_speculative_tokens": 4}', 61, 9.13 / 8),
    ],
)
def test_a_head_without_its_configuration_counts_by_its_kind(
    capsys: Capsys, config: str, layers: int, gib: float
) -> None:
    plain = plan(capsys, *LARGE).document
    answer = plan(capsys, *LARGE, "-sc", config)

    assert answer.status == 0
    assert answer.document["bytes_per_token"] * 61 == plain["bytes_per_token"] * layers
    assert (answer.document["weights_bytes"] - plain["weights_bytes"]) / GIB == pytest.approx(gib, rel=0.02)


def test_a_head_shares_the_models_embedding(tmp_path: Path, capsys: Capsys) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    head = {"num_hidden_layers": 1, "vocab_size": 128256, "torch_dtype": "bfloat16", "model_type": "llama"}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, **sizes, **head}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = (*of("llama-3.1-8b"), "--gpu", "H100", "--json")
    plain = plan(capsys, *words).document
    drafted = plan(capsys, *words, "--draft-model-config", str(tmp_path)).document

    # A layer, three outputs to its input, twice as wide queries, keys and values, and 32,000 x 4,096.
    parameters = 218_112_000 + 3 * 4096**2 + 4096 * 48 * 128 + 32_000 * 4096
    assert drafted["weights_bytes"] - plain["weights_bytes"] == pytest.approx(2 * parameters, rel=0.001)
    assert drafted["bytes_per_token"] * 32 == plain["bytes_per_token"] * 33


@pytest.mark.parametrize(
    ("config", "release", "problem"),
    [
        ('{"method": "medusa", "model": "acme/medusa"}', "0.33", "vLLM 0.33 has no method 'medusa'"),
        ('{"method": "dspark"}', "0.24", "vLLM 0.24 has no method 'dspark'"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', "0.33", "the method eagle needs a model"),
    ],
)
def test_a_method_of_speculation_that_vllm_refuses(capsys: Capsys, config: str, release: str, problem: str) -> None:
    answer = plan(capsys, *of("llama-3.1-8b"), "--vllm-version", release, "-sc", config)

    assert answer.status == 2
    assert problem in answer.err


def test_the_own_heads_of_a_model_count_as_further_layers(capsys: Capsys) -> None:
    words = ("--model", "deepseek-ai/DeepSeek-R1", "--gpu", "8xH200", "--json")
    plain = plan(capsys, *words).document
    heads = plan(capsys, *words, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}').document

    assert heads["bytes_per_token"] * 61 == plain["bytes_per_token"] * 62
    assert heads["weights_bytes"] > plain["weights_bytes"]


def test_no_images_and_a_whole_encoder_change_the_weights(capsys: Capsys) -> None:
    card = ("--model", "Qwen/Qwen3-VL-8B-Instruct", "--gpu", "2xH100", "--json")
    plain = plan(capsys, *card).document["weights_bytes"]
    textual = plan(capsys, *card, "--limit-mm-per-prompt", "image=0,video=0").document["weights_bytes"]
    repeated = plan(capsys, *card, "--mm-encoder-tp-mode", "data").document["weights_bytes"]

    assert textual < plain < repeated
    assert repeated - plain == plain - textual
    assert plan(capsys, *card, "--limit-mm-per-prompt.image", "2").document["weights_bytes"] == plain


def test_a_small_batch_lowers_the_default_number_of_sequences(capsys: Capsys) -> None:
    answer = plan(capsys, *of("llama-3.1-8b"), "--gpu", "H100", "--max-num-batched-tokens", "256")

    assert answer.status == 0
    assert "  256 x 131,072 tokens" in answer.out


def test_options_without_memory_are_listed_as_not_counted(capsys: Capsys) -> None:
    answer = plan(capsys, *of("llama-3.1-8b"), "--gpu", "H100", "-O3", "--trust-remote-code", "--seed", "1")

    assert answer.status == 0
    assert "Not counted: -O3, --trust-remote-code, --seed." in answer.out


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (
            ("--gpu-memory", "24GiB", "--max-num-seqs", "1", "--max-model-len", "100000"),
            1,
            "It does not fit: one sequence of 100,000 tokens needs 12.21 GiB of KV cache, of at most",
        ),
        (
            ("--gpu-memory", "24GiB", "--gpu-memory-utilization", "1", "--max-model-len", "8192"),
            1,
            'vLLM: "Free memory on device cuda:0 (23.60/23.70 GiB) on startup is less than desired GPU memory',
        ),
        (
            ("--gpu-memory", "24GiB", "--kv-cache-memory-bytes", "20GiB", "--max-model-len", "8192"),
            1,
            "It does not fit: weights, activations and the KV cache are more than the card's 24.00 GiB.",
        ),
        (
            ("--gpu-memory", "17.5GiB", "--kv-cache-memory-bytes", "1GiB", "--max-model-len", "8192"),
            2,
            "Too close to call: warming up the sampler with 256 sequences takes 0.18 to 0.45 GiB, and",
        ),
        (
            ("--gpu-memory", "80GiB", "--max-model-len", "256", "--max-num-seqs", "8"),
            0,
            "It fits: vLLM starts. All 8 sequences of 256 tokens fit at once.",
        ),
        (
            ("--gpu-memory", "24GiB", "--gpu-memory-utilization", "0.98", "--max-model-len", "256"),
            0,
            "Beside its budget vLLM takes 0.10 to 0.60 GiB of the card, and 0.47 GiB are left for that.",
        ),
        (("--max-model-len", "256"), 2, "Cannot tell whether it fits; missing: the card (--gpu or --gpu-memory)."),
    ],
)
def test_the_verdict_says_why(words: tuple[str, ...], status: int, sentence: str, capsys: Capsys) -> None:
    answer = plan(capsys, *of("llama-3.1-8b"), *words)

    assert answer.status == status
    assert sentence in " ".join(answer.out.split())


def test_a_folder_stands_for_its_configuration_and_its_index_says_the_weights(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "config.json").write_text(config_text("llama-3.1-8b"))
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {"total_size": 16060522496}, "weight_map": {}}'
    )

    for path in (tmp_path, tmp_path / "config.json"):
        answer = plan(capsys, "--model-config", str(path), "--gpu-memory", "24GiB", "--max-model-len", "4096")

        assert "8.03 billion parameters" in answer.out

    assert plan(capsys, "--model-config", str(tmp_path), "--json").document["weights_bytes"] == 16_094_076_928


def test_quantised_weights_are_served_as_they_lie_there(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "config.json").write_text(config_text("qwen2.5-7b-awq"))
    index = {"metadata": {"total_size": 5_570_000_000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    words = ("--model-config", str(tmp_path), "--json")

    assert plan(capsys, *words).document["weights_bytes"] == 5_578_388_608  # with 32,768 positions of 128 values
    assert (
        plan(capsys, *words, "--quantization", "fp8").document["weights_bytes"] == 6_533_677_056 + 4 * 152_064 * 3_584
    )


def test_a_32_bit_checkpoint_is_served_in_16(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "config.json").write_text(config_text("gpt2"))
    for name, size in (("model.safetensors", 548_105_171), ("consolidated.safetensors", 548_000_000)):
        with (tmp_path / name).open("wb") as weights:
            weights.truncate(size)

    weights_bytes = plan(capsys, "--model-config", str(tmp_path), "--json").document["weights_bytes"]

    assert weights_bytes == 2 * (548_105_171 // 4)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"metadata": {"total_size": -1}}', '{"metadata": 7}', "\xff"])
def test_an_index_that_does_not_say_leaves_the_weights_to_be_counted(
    index: str, tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "config.json").write_text(config_text("tiny"))
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="latin-1")

    assert plan(capsys, "--model-config", str(tmp_path), "--json").document["weights_bytes"] == 1_376_256


def test_an_encoder_has_no_cache_and_fits_by_its_weights(capsys: Capsys) -> None:
    answer = plan(capsys, *of("multilingual-e5-large"), "--gpu-memory", "24GiB", "--max-num-seqs", "64", "--json")

    assert (answer.status, answer.document["bytes_per_token"], answer.document["bytes_per_block"]) == (0, 0, None)
    assert answer.document["kv_capacity_tokens"] is None
    assert "there is no KV cache" in answer.headline
    assert "none: the model keeps nothing" in plan(capsys, *of("multilingual-e5-large")).out


def test_an_unknown_type_of_model_is_said_and_not_vouched_for(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "config.json"
    file.write_text(config_text("step-3.7-flash").replace("step3p7", "step9"))
    words = ("--model-config", str(file), "--gpu-memory", "1000GiB", "-tp", "8", "--max-model-len", "4096")
    answer = plan(capsys, *words, "--json")

    assert (answer.status, answer.document["unknown_architecture"]) == (2, "step9")
    assert answer.document["unknown"][0].startswith("what models of type 'step9' keep")
    assert "Models of type 'step9' have not been checked" in " ".join(plan(capsys, *words).out.split())
    assert plan(capsys, *words, "--layers", "45", "--kv-heads", "8", "--head-size", "128").status == 0


@pytest.mark.parametrize(
    ("words", "saved_bytes"),
    [
        (("--cpu-offload-gb", "4"), 4 * GIB),
        (
            ("--enable-lora", "--max-loras", "2"),
            -2 * 16 * 2 * 2_621_440,
        ),  # 81,920 inputs and outputs in each of 32 layers
        (("--max-loras", "2"), 0),
    ],
)
def test_weights_are_less_what_is_offloaded_and_more_for_adapters(
    capsys: Capsys, words: tuple[str, ...], saved_bytes: int
) -> None:
    plain = plan(capsys, *of("llama-3.1-8b"), "--json").document["weights_bytes"]

    assert plain - plan(capsys, *of("llama-3.1-8b"), *words, "--json").document["weights_bytes"] == saved_bytes


def test_data_parallel_engines_share_experts(capsys: Capsys) -> None:
    one_engine = plan(capsys, *of("mixtral-8x7b"), "-tp", "2", "--json").document
    four = plan(capsys, *of("mixtral-8x7b"), "-tp", "2", "-dp", "4", "--json").document

    assert (one_engine["gpus"], four["gpus"]) == (2, 8)
    assert four["bytes_per_token"] == one_engine["bytes_per_token"]
    assert four["weights_bytes"] < one_engine["weights_bytes"] / 3


def test_a_draft_model_takes_weights_and_cache(capsys: Capsys) -> None:
    draft = ("--draft-model-config", of("tiny")[1])
    alone, both = (plan(capsys, *of("llama-3.1-8b"), *extra_words, "--json").document for extra_words in ((), draft))

    assert both["bytes_per_token"] - alone["bytes_per_token"] == 512
    assert both["bytes_per_block"] - alone["bytes_per_block"] == 16 * 512
    assert both["weights_bytes"] > alone["weights_bytes"]
    # Beside layers with a window the draft counts as further full layers, of which 21 are there.
    words = (*of("gemma-2-9b"), "--gpu", "H100", "--json")
    alone, both = (plan(capsys, *words, *extra_words).document for extra_words in ((), draft))
    assert alone["bytes_per_token"] < both["bytes_per_token"] <= alone["bytes_per_token"] * 45 / 42
    assert both["kv_capacity_tokens"] < alone["kv_capacity_tokens"]


def test_an_encoder_of_images_is_weighed_or_asked_for(capsys: Capsys) -> None:
    counted = plan(capsys, *of("gemma-3-27b-it"), "--json").document
    without = plan(capsys, *of("gemma-3-27b-it"), "--language-model-only", "--json").document
    untold = plan(capsys, *of("gemma-4-31b-it-nvfp4"), "--gpu-memory", "141GiB", "--json")

    assert counted["weights_bytes"] - without["weights_bytes"] == 2 * 411_070_464
    assert (untold.status, untold.document["unknown"]) == (2, ["the image or audio encoder's weights (--parameters)"])
    assert (counted["encoder_items"], without["encoder_items"]) == (32, None)
    assert counted["activation_bytes"]["low"] > without["activation_bytes"]["low"]


def test_an_encoder_that_nobody_has_looked_up_is_not_vouched_for(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "config.json"
    file.write_text(config_text("kimi-k2.5").replace('"kimi_k25"', '"kimi_k99"'))
    room = ("--gpu-memory", "288GiB", "-tp", "8", "--max-model-len", "4096", "--json")
    untold = plan(capsys, "--model-config", str(file), *room)
    without = plan(capsys, "--model-config", str(file), *room, "--language-model-only")

    assert untold.document["unknown"] == ["its largest image or sound (else --language-model-only)"]
    assert (untold.status, without.status) == (2, 0)


def test_a_length_that_makes_it_fit_is_named_where_the_model_gives_none(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--layers", "32", "--kv-heads", "20", "--head-size", "64", "--hidden-size", "1280")
    answer = plan(capsys, *sizes, "--vocabulary", "51866", "--parameters", "1.54B", "--gpu-memory", "24GiB")

    assert answer.status == 2
    assert "No change" not in answer.out
    assert re.search(r"--max-model-len 1\d{5}", answer.out)


def test_that_nothing_would_make_it_fit_is_said_of_useful_lengths_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--layers",
        "80",
        "--kv-heads",
        "8",
        "--head-size",
        "128",
        "--hidden-size",
        "8192",
        "--vocabulary",
        "128256",
    )
    answer = plan(capsys, *sizes, "--parameters", "9000B", "--max-model-len", "8192", "--gpu-memory", "8GiB")

    assert answer.status == 1
    assert "No change of one or two settings would make it fit for 256 tokens or more." in answer.out
