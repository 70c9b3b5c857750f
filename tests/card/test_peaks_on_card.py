"""Peaks of steps in a real vLLM on the stand-in card: the fit at twice the size, and the end by one request."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_ended, wait_until_served, watch
from tests.card.card import FOLDER, GIB, MIB, Cards
from tests.card.test_ends import ask_in_vain, read_postmortem, write_model
from tests.process import eventually
from vllm_headroom.derive.peaks import fit_sizes
from vllm_headroom.model import PeakReadings, WorkPeaks
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.vocabulary import Work

pytestmark = pytest.mark.card

VOCABULARY: Final = 32_000
SIZES: Final = (64, 96, 128, 192, 256, 384, 512, 768)
SHAPE: Final = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32_768,
}
OPTIONS: Final = ("--enforce-eager", "--max-model-len", "16384", "--max-num-batched-tokens", "8192")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    shutil.copytree(FOLDER / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE))
    cards = Cards(folder=tmp_path / "cards", total_bytes=12 * GIB)
    options = (*OPTIONS, "--gpu-memory-utilization", "0.9")
    variables = {"HEADROOM_PROBE_PEAKS": "on"}
    with watch(tmp_path, *options, cards=cards, model=path.parent, variables=variables) as running:
        yield wait_until_served(running)


def ask(bench: Bench, tokens: int, **body: Any) -> None:
    prompt = [3 + (step * 7 + tokens) % 900 for step in range(tokens)]
    assert bench.post("/v1/completions", model="tiny", prompt=prompt, max_tokens=2, ignore_eos=True, **body).is_success


def read_peaks(bench: Bench) -> PeakReadings:
    """The peaks in the file of the core, which has every step of before the call."""

    def read() -> PeakReadings | None:
        parsed = parse_probe(json.dumps(bench.read_reports().get("EngineCore", {})).encode())
        is_new = not isinstance(parsed, str) and parsed[0].written_at_seconds > began
        return parsed[0].peaks if is_new and not isinstance(parsed, str) else None

    began = time.time()
    return eventually(read, "the probe writes its peaks", LOOK_SECONDS, 1)


def find_work(peaks: PeakReadings, work: Work) -> WorkPeaks:
    return next(peak_work for peak_work in peaks.works if peak_work.work is work)


def test_peaks_are_predicted_at_twice_the_size_and_one_request_ends_the_engine(bench: Bench) -> None:
    for tokens in SIZES:
        ask(bench, tokens)
        ask(bench, tokens, prompt_logprobs=1)
    smaller = read_peaks(bench)
    ask(bench, 2 * SIZES[-1], prompt_logprobs=1)
    larger = read_peaks(bench)

    for work in (Work.PREFILL, Work.PROMPT_LOGPROBS):
        fit = fit_sizes(find_work(smaller, work).sizes)
        highest = find_work(larger, work).highest
        assert fit is not None
        assert highest is not None
        sys.stdout.write(
            f"{work}: {highest}, {fit.predict_bytes(highest.size)} +- {fit.measure_spread(highest.size)}\n"
        )
        assert highest.size == 2 * SIZES[-1]
        assert abs(highest.transient_bytes - fit.predict_bytes(highest.size)) <= fit.measure_spread(highest.size)
    # The logits in the model's type, as floats, and their logarithms.
    logits_bytes = 2 * SIZES[-1] * VOCABULARY * (2 + 4 + 4)
    logprobs = find_work(larger, Work.PROMPT_LOGPROBS).highest
    assert logprobs is not None
    assert logprobs.transient_bytes == pytest.approx(logits_bytes, rel=0.05)

    page = bench.daemon.sees(
        lambda page: page.has("engine_safe_prompt_logprobs_tokens"), "a safe size", LOOK_SECONDS, 1
    )
    safe = int(page.value("engine_safe_prompt_logprobs_tokens"))
    ask(bench, int(0.98 * safe), prompt_logprobs=1)
    ask_in_vain(bench, prompt=[3] * 8000, prompt_logprobs=1)
    wait_until_ended(bench)
    postmortem = read_postmortem(bench)
    assert "8,000 prompt tokens with prompt logprobs of one request" in postmortem["sentence"]
    assert postmortem["sure"] == "sure"
    assert page.value("engine_peak_room_bytes") > 256 * MIB


DRAFTED_TOKENS: Final = 32
DRAFTS: Final = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTED_TOKENS,
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 3,
}
REQUESTS: Final = 56
HOLD_SECONDS: Final = 20


@pytest.fixture
def drafting_bench(tmp_path: Path) -> Iterator[Bench]:
    cards = Cards(folder=tmp_path / "cards", total_bytes=12 * GIB)
    model = write_model(tmp_path / "tiny")
    sizes = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--max-model-len", "4096")
    options = ("--enforce-eager", "--gpu-memory-utilization", "0.95", "--speculative-config", json.dumps(DRAFTS))
    variables = {"HEADROOM_PROBE_PEAKS": "on", "CARD_SAMPLES_ZEROS": "1"}
    with watch(tmp_path, *sizes, *options, cards=cards, model=model, variables=variables) as running:
        yield wait_until_served(running)


def test_a_step_of_decode_that_verifies_drafts_ends_the_engine(drafting_bench: Bench) -> None:
    """vLLM's profile verifies one drafted token a request, so nothing is kept free for the logits of 32."""
    bench = drafting_bench

    def is_measured() -> bool:
        bench.complete(4)
        return bool(bench.read_reports().get("EngineCore", {}).get("peaks"))

    eventually(is_measured, "the probe measures", LOOK_SECONDS, 1)
    bench.order("hold", HOLD_SECONDS)
    # Each token is 0: after these prompts vLLM drafts zeros at once.
    prompts = [[300 + number] + [0] * (DRAFTED_TOKENS + 3) for number in range(REQUESTS)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask_in_vain, bench, max_tokens=1)
        time.sleep(HOLD_SECONDS / 4)
        ask_in_vain(bench, prompt=prompts, max_tokens=2 * DRAFTED_TOKENS)
    wait_until_ended(bench)
    postmortem = read_postmortem(bench)

    drafted = REQUESTS * DRAFTED_TOKENS
    words = f"{REQUESTS + drafted:,} tokens of {REQUESTS} requests, {drafted:,} of them drafted"
    assert f"an allocation of torch failed in a step of {words}." in postmortem["sentence"]
    assert postmortem["sure"] == "sure"
