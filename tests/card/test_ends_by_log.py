"""Ends of a real vLLM that its own log explains: what the daemon, its incident, postmortem and advise make of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_ended, wait_until_served, watch
from tests.card.card import GIB, Cards, take
from tests.card.test_ends import leak_until_full, let_neighbour_take_the_rest, request_prompt_logprobs, write_model
from tests.command import read_data

pytestmark = pytest.mark.card

EAGER: Final = ("--enforce-eager", "--gpu-memory-utilization", "0.9")
MAMBA: Final = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 128,
    "expand": 8,
    "conv_kernel": 4,
    "chunk_size": 256,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "rms_norm": True,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""A model with a state of 36 MiB a request."""


@dataclass(frozen=True)
class End:
    """How vLLM ends, and what the reports on that have to contain."""

    causes: set[str]
    failure: str | None
    """The failure as `advise --json` names it; None where the log has none."""

    reason: str
    """The reason of the exit, as `headroom_engine_exits_total` counts it."""

    end: Callable[[Bench], None] | None = None
    """None where the start itself fails."""

    sure: str = "sure"
    options: tuple[str, ...] = EAGER
    changes: dict[str, Any] = field(default_factory=dict)
    """What is changed in the model's configuration."""

    neighbour_bytes: int = 0
    """What another process holds of the card from before the start."""


def find_core(bench: Bench) -> int:
    """Return the PID of the process that holds most of the card."""
    holders = bench.cards.read_holders()
    return max(holders, key=lambda pid: holders[pid])


def break_card(bench: Bench) -> None:
    bench.order("break")
    complete_in_vain(bench)


def raise_in_core(bench: Bench) -> None:
    bench.order("raise")
    complete_in_vain(bench)


def kill_core(bench: Bench) -> None:
    os.kill(find_core(bench), signal.SIGKILL)


def stop(bench: Bench) -> None:
    bench.engine.process.send_signal(signal.SIGTERM)


def complete_in_vain(bench: Bench) -> None:
    try:
        bench.complete(4)
    except httpx.HTTPError as error:
        sys.stdout.write(f"{error!r}\n")


NEVER: Final = {"start_never_fitted"}
ENDS: Final = {
    "prompt logprobs": End({"out_of_memory_burst"}, "gpu_out_of_memory", "out_of_memory", request_prompt_logprobs),
    # It leaks within seconds, which is a burst too.
    "leak": End({"out_of_memory_leak", "out_of_memory_burst"}, "gpu_out_of_memory", "out_of_memory", leak_until_full),
    "neighbour": End({"out_of_memory_neighbour"}, "gpu_out_of_memory", "out_of_memory", let_neighbour_take_the_rest),
    "weights": End(
        NEVER,
        "gpu_out_of_memory",
        "out_of_memory",
        changes={"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8},
    ),
    "no room for the cache": End(
        NEVER, "no_kv_cache_memory", "gone", options=("--enforce-eager", "--gpu-memory-utilization", "0.05")
    ),
    "context": End(
        NEVER,
        "context_too_long",
        "gone",
        options=("--enforce-eager", "--gpu-memory-utilization", "0.08"),
        changes={"max_position_embeddings": 1_000_000},
    ),
    "taken before": End(NEVER, "little_free_memory", "gone", neighbour_bytes=6 * GIB),
    "states": End(
        NEVER,
        "too_few_state_blocks",
        "gone",
        options=("--gpu-memory-utilization", "0.9", "--max-num-seqs", "1024"),
        changes=MAMBA,
    ),
    "CUDA error": End({"crash"}, "cuda", "gone", break_card),
    "stopped": End({"orderly_end"}, None, "stopped", stop),
    # Without the kernel's count of its kills, a person may have done it.
    "killed": End({"killed_by_kernel", "crash"}, None, "gone", kill_core, sure="likely"),
    # One exception alone may be that of a request.
    "exception": End({"crash"}, "exception", "gone", raise_in_core, sure="likely"),
}


@contextmanager
def serve(place: Path, end: End) -> Iterator[Bench]:
    cards = Cards(folder=place / "cards", total_bytes=12 * GIB)
    model = write_model(place / "tiny")
    if end.changes.get("model_type"):
        (model / "config.json").write_text(json.dumps(end.changes))
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | end.changes))
    with ExitStack() as stack:
        log = str(place / "vllm.log")
        watching = watch(place, *end.options, cards=cards, model=model, SAMPLE_INTERVAL_SECONDS="1", ENGINE_LOG=log)
        bench = stack.enter_context(watching)
        if end.neighbour_bytes:  # vLLM looks at the card seconds later
            stack.enter_context(take(cards, end.neighbour_bytes))
        yield bench


def run_command(*words: str | Path) -> str:
    command = [sys.executable, "-m", "vllm_headroom", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ENDS)
def test_the_log_makes_the_cause_sure(tmp_path: Path, name: str) -> None:
    end = ENDS[name]
    with serve(tmp_path, end) as bench:
        if end.end is not None:
            wait_until_served(bench).complete()
            bench.daemon.sees(
                lambda page: page.has("allocator_ooms_total") and page.value("source_up", source="engine") == 1,
                "the probe and the page are read",
                LOOK_SECONDS,
                1,
            )
            end.end(bench)
        wait_until_ended(bench)
        bench.daemon.sees(lambda page: page.has("last_incident_timestamp_seconds"), "an incident", LOOK_SECONDS, 1)
        exits = bench.daemon.page()
    log = tmp_path / "vllm.log"
    if keep := os.environ.get("CARD_KEEP"):
        kept_folder = Path(keep) / name.replace(" ", "-")
        shutil.rmtree(kept_folder, ignore_errors=True)
        kept_folder.mkdir(parents=True)
        shutil.copy(log, kept_folder)
        shutil.copytree(tmp_path / "state", kept_folder / "state")
        (kept_folder / "postmortem.txt").write_text(run_command("postmortem", tmp_path / "state"))
        (kept_folder / "postmortem-log.txt").write_text(run_command("postmortem", tmp_path / "state", "--log", log))
        (kept_folder / "advise.txt").write_text(run_command("advise", log))
        (kept_folder / "exits.txt").write_text(exits.text if hasattr(exits, "text") else "")
    incident = read_data(run_command("postmortem", tmp_path / "state", "--json"))
    by_log = read_data(run_command("postmortem", tmp_path / "state", "--log", log, "--json"))
    advice = json.loads(run_command("advise", log, "--json"))["data"]["log"]
    for report in (incident, by_log):
        sys.stdout.write(json.dumps({key: report[key] for key in ("cause", "sure", "sentence", "evidence")}) + "\n")
    failure = advice["failure"]
    sys.stdout.write(json.dumps(failure) + "\n")

    assert end.failure is None or failure["kind"] == end.failure
    assert exits.value("engine_exits_total", reason=end.reason) == 1
    for report in (incident, by_log):
        assert report["cause"] in end.causes
        assert report["sure"] == end.sure
