"""The command `load` against a local server that streams and fails: the client's counts are the server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.streaming_server import StreamingServer, Way
from tests.process import eventually

OWN = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}
BRIEF = ("--duration", "0.5s", "--output-tokens", "4", "--prompt-tokens", "8..64")
ENDLESS = ("--duration", "1h", "--output-tokens", "4", "--prompt-tokens", "8")
IS = {
    Way.STREAM: "succeeded",
    Way.OUT_OF_MEMORY: "out_of_memory",
    Way.OUT_OF_MEMORY_IN_STREAM: "out_of_memory",
    Way.BAD_REQUEST: "failed",
    Way.ABORTED: "failed",
    Way.BUSY: "rejected",
    Way.UNAVAILABLE: "rejected",
    Way.CUT: "closed",
    Way.RESET: "closed",
    Way.STALL: "unfinished",
    Way.STALL_IN_STREAM: "unfinished",
}


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a", used_bytes=70 * GIB)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


class Load:
    """A running `load` of ten clients."""

    def __init__(self, url: str, trace: Path, *words: str, environment: dict[str, str] | None = None) -> None:
        usual = {"--trace": str(trace), "--concurrency": "10", "--gpus": "0"}
        options = (word for pair in usual.items() if pair[0] not in words for word in pair)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_headroom", "load", "--engine-url", url, *options, *words],
            env=OWN | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.error = ""

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and what was printed."""
        output, self.error = self.process.communicate(timeout=120)
        return self.process.returncode, output

    def found(self, status: int) -> dict[str, Any]:
        """Return the one object that was printed, after an end with this status."""
        exit_status, output = self.end()
        assert exit_status == status, output + self.error
        document: dict[str, Any] = read_data(output)
        return document


def samples(trace: Path) -> list[dict[str, Any]]:
    """Return what is recorded so far."""
    lines = trace.read_text().splitlines()[1:] if trace.exists() else []
    return [json.loads(line) for line in lines]


def running(trace: Path) -> set[float]:
    return {sample["engines"][0]["running"] for sample in samples(trace) if sample["engines"]}


def total(document: dict[str, Any], field: str) -> int:
    return sum(int(step[field]) for step in document["steps"])


@pytest.fixture
def stopped_at_the_end() -> Iterator[list[Load]]:
    started: list[Load] = []
    yield started
    for load in started:
        load.process.kill()
        load.process.communicate()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_healthy_server_is_loaded_in_four_steps(nvml: FakeNvml, trace: Path, api: str) -> None:
    with StreamingServer() as server:
        load = Load(server.url, trace, "--json", "--api", api, *BRIEF, environment=nvml.environment())
        document = load.found(0)

        assert (
            document["requests"]["began"] == document["requests"]["succeeded"] == server.finished == server.ways.total()
        )
        assert total(document, "prompt_tokens") == server.prompt_tokens
        assert total(document, "generation_tokens") == server.generation_tokens == 4 * server.finished
    assert [step["clients"] for step in document["steps"]] == [5, 8, 10, 12]
    assert all(1 <= step["streams_most"] <= step["clients"] for step in document["steps"])
    assert (document["faults"], document["model"], document["interrupted"]) == ([], "tiny", False)
    assert {request["model"] for request in server.requests} == {"tiny"}
    assert 8 * server.finished <= server.prompt_tokens <= 64 * server.finished
    assert document["samples"] == len(samples(trace)) >= 8
    assert samples(trace)[-1]["engines"][0]["finished_total"] == server.finished
    assert (document["gpus"][0]["delta_bytes"], document["gpus"][0]["requests_finished"]) == (0, server.finished)
    assert "up to 12 streams at once; " in load.error
    assert "step 4/4: 120%, 12 clients, 0.5 s" in load.error


def test_the_trace_can_be_replayed(nvml: FakeNvml, trace: Path) -> None:
    with StreamingServer() as server:
        status, output = Load(server.url, trace, *BRIEF, environment=nvml.environment()).end()
    replayed = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "replay", str(trace), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert status == 0
    assert f"vllm-headroom replay {trace}" in output
    assert [gpu["uuid"] for gpu in read_data(replayed.stdout)["gpus"]] == ["GPU-a"]
    assert "Cannot tell whether it leaks: " in output


def test_every_failure_is_counted_as_the_server_did_it(nvml: FakeNvml, trace: Path) -> None:
    ways = [Way.STREAM, Way.STREAM, *IS]
    with StreamingServer(lambda number: ways[number % len(ways)]) as server:
        load = Load(server.url, trace, "--json", "--grace", "1.5s", *BRIEF, environment=nvml.environment())
        document = load.found(1)

        truth: Counter[str] = Counter()
        for way, count in server.ways.items():
            truth[IS[way]] += count
    assert {name: count for name, count in document["requests"].items() if count and name != "began"} == truth
    assert document["requests"]["began"] == server.ways.total()
    assert total(document, "generation_tokens") == server.generation_tokens
    unserved = truth.total() - truth["succeeded"] - truth["out_of_memory"]
    assert document["faults"] == [
        f"{truth['out_of_memory']} answers were out of memory",
        f"{unserved} of {truth.total()} requests were not served",
    ]
    assert {complaint["outcome"] for complaint in document["said"]} == {"failed", "out_of_memory", "rejected"}


def test_memory_and_its_cost_are_reported_of_what_ran(
    nvml: FakeNvml, trace: Path, stopped_at_the_end: list[Load]
) -> None:
    with StreamingServer(lambda _: Way.STALL_IN_STREAM) as server:
        load = Load(server.url, trace, "--json", *ENDLESS, environment=nvml.environment())
        stopped_at_the_end.append(load)
        eventually(lambda: 5 in running(trace), "a sample of the first step's five requests")
        nvml.gpus[0].used_bytes = 75 * GIB
        server.preemptions = 3
        nvml.write()
        eventually(
            lambda: any(sample["gpus"][0]["used"] == 75 * GIB for sample in samples(trace)), "a sample of more memory"
        )
        load.process.send_signal(signal.SIGINT)
        document = load.found(2)

    (step,), (gpu,) = document["steps"], document["gpus"]
    assert document["interrupted"] is True
    assert document["requests"]["unfinished"] == document["requests"]["began"] == 5
    assert (gpu["before_bytes"], gpu["most_bytes"], gpu["after_bytes"]) == (70 * GIB, 75 * GIB, 75 * GIB)
    assert step["gpus"][0]["held_most_bytes"] == 75 * GIB
    assert 0.99 * 70 * GIB / 5 <= step["gpus"][0]["bytes_per_running_request"] <= 75 * GIB  # to three digits
    assert (step["streams_most"], step["engine"]["running_most"], step["engine"]["preemptions"]) == (5, 5, 3)
    assert step["engine"]["kv_used_ratio_most"] > 0
    assert gpu["verdict"] == "cannot_tell"


def test_an_engine_that_dies_is_not_good(trace: Path, stopped_at_the_end: list[Load]) -> None:
    with StreamingServer() as server:
        load = Load(server.url, trace, "--json", "--duration", "1h")
        stopped_at_the_end.append(load)
        eventually(lambda: server.finished, "a request is served")
    document = load.found(1)

    assert len(document["steps"]) == 1, "it does not go on without the engine"
    assert document["interrupted"] is False
    assert document["faults"][0].startswith("the engine is gone: its page refuses connections")
    assert document["requests"]["succeeded"] == server.finished
    assert document["requests"]["refused"] > 0
    assert "engine in " in " ".join(document["unread"])


def test_a_token_is_sent_and_its_lack_is_reported(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    with StreamingServer(token="secret") as server:
        without = Load(server.url, trace, *BRIEF)
        refused = without.end()
        status, output = Load(
            server.url, trace, "--engine-bearer-token-file", str(file), "--max-requests", "1", *BRIEF
        ).end()

    assert refused == (2, "")
    assert without.error.splitlines()[-1].startswith(f"vllm-headroom load: {server.url}/v1/models answers 401")
    assert status == 0
    assert "The load ended at --max-requests, before the other steps." in output
    assert "GOOD: 1 of 1 requests succeeded, none was out of memory." in output


def test_what_cannot_be_loaded_is_one_line_and_nothing_is_asked(trace: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    with StreamingServer() as server:
        for words, problem in (
            (("--prompt-tokens", "4000", "--output-tokens", "97"), "tiny takes 4096 (max_model_len)"),
            (("--concurrency", "1000000"), " in this process"),
            (("--trace", str(there)), "is there already: name another file"),
            (("--trace", str(tmp_path / "missing" / "file")), "cannot be written: No such file or directory"),
        ):
            load = Load(server.url, trace, *words)
            assert load.end() == (2, "")
            assert load.error.splitlines()[-1].startswith("vllm-headroom load: ")
            assert load.error.splitlines()[-1].endswith(problem)

        assert server.ways.total() == 0
    refused_load = Load(server.url, trace, *BRIEF)
    assert refused_load.end() == (2, "")
    refused = f"vllm-headroom load: no connection to {server.url} (Connection refused): "
    assert refused_load.error.splitlines()[-1].startswith(refused)
    assert not trace.exists()


def test_a_reader_who_goes_away_is_no_error(trace: Path) -> None:
    with StreamingServer() as server:
        load = Load(server.url, trace, "--max-requests", "1", *BRIEF)
        assert load.process.stdout is not None
        load.process.stdout.close()

        assert load.process.wait(60) == 0
        assert load.process.stderr is not None
        assert "Traceback" not in load.process.stderr.read()
        load.process.stderr.close()
