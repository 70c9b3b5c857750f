"""The options of `vllm serve` in lines, scripts, manifests, files of options, and processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.commands.plan.asked import plan
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.serve_line import read_serve_line

Capsys = pytest.CaptureFixture[str]

DEPLOYMENT = """\
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: proxy
          image: nginx
          args: ["-g", "daemon off;"]
        - name: vllm
          image: vllm/vllm-openai:latest
          args: ["--model", "Qwen/Qwen3-32B", "--max-model-len=$(LENGTH)", -tp, "2"]
          env:
            - {name: LENGTH, value: "8192"}
            - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
"""

COMPOSE = """\
services:
  llm:
    image: ghcr.io/acme/engine
    command: vllm serve Qwen/Qwen3-32B --max-model-len ${LENGTH:-8192} -tp 2
"""

SHELL = """\
containers:
  - image: registry.local/vllm-custom:1
    command: [/bin/bash, -c]
    args:
      - |
        export LENGTH=8192
        exec vllm serve Qwen/Qwen3-32B \\
          --max-model-len $LENGTH -tp 2 2>&1 | tee /log
"""

SCRIPT = """\
#!/bin/bash
# vllm serve is started with docker
LENGTH=8192
pip list | grep vllm
docker run --gpus all -e A=1 vllm/vllm-openai:latest --model Qwen/Qwen3-32B \\
    --max-model-len "$LENGTH" \\
    -tp 2 && echo "it's up"
"""

ARRAYS = """\
export MODEL=Qwen/Qwen3-32B
LENGTH="--max-model-len 8192"
RANKS=(
  -tp  # two of them
  2
)
vllm serve "$MODEL" $LENGTH "${RANKS[@]}" &
"""

UNIT = """\
[Service]
Environment=HF_HOME=/data
ExecStart=/opt/vllm/bin/vllm serve Qwen/Qwen3-32B --max-model-len 8192 \\
  -tp 2
Restart=always
"""

QUOTED = (
    "HF_HOME=/x CUDA_VISIBLE_DEVICES=0,1 python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B -tp 2"
)


@pytest.mark.parametrize("text", [DEPLOYMENT, COMPOSE, SHELL, SCRIPT, ARRAYS, UNIT])
def test_a_script_or_a_manifest_has_the_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "start with a space"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    by_file = read_serve_line([str(file)])

    assert " ".join(by_file).replace("=", " ") == "--model Qwen/Qwen3-32B --max-model-len 8192 -tp 2"
    assert read_serve_line(["-"]) == by_file


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "Qwen/Qwen3-32B", "-tp", "2"],
        ["vllm serve Qwen/Qwen3-32B -tp 2"],
        ["VLLM_USE_V1=1", "/opt/venv/bin/vllm", "serve", "Qwen/Qwen3-32B", "-tp", "2", "|", "tee", "log"],
        ["Qwen/Qwen3-32B", "-tp", "2"],
        ["--model=Qwen/Qwen3-32B", "-tp", "2"],
        [QUOTED],
        QUOTED.split(),
        ["sudo", "docker", "run", "--ipc=host", "vllm/vllm-openai:v0.11.0", "Qwen/Qwen3-32B", "-tp", "2"],
    ],
)
def test_a_line_may_begin_before_vllm(words: list[str]) -> None:
    assert " ".join(read_serve_line(words)).replace("=", " ") == "--model Qwen/Qwen3-32B -tp 2"


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.28.0", "0.28"),
        ("registry.local:5000/mirror/vllm-openai:v0.20.0-cu130", "0.20"),
        ("vllm/vllm-openai:latest", "0.33"),
        ("vllm/vllm-openai:v0.11.0", "0.33"),
        ("nvcr.io/nvidia/vllm:25.10-py3", "0.33"),
    ],
)
def test_the_release_is_that_of_the_image(image: str, version: str, capsys: Capsys) -> None:
    line = ("docker", "run", image, "vllm", "serve", "Qwen/Qwen3-8B")

    assert plan(capsys, "--gpu", "H100", "--json", "--", *line).document["vllm_version"] == version
    typed = plan(capsys, "--gpu", "H100", "--vllm-version", "0.24", "--json", "--", *line)
    assert typed.document["vllm_version"] == "0.24"


@pytest.mark.parametrize(
    "words",
    [
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve"),
        [
            "docker",
            "run",
            "-e",
            "VLLM_USE_V2_MODEL_RUNNER=0",
            "-e",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=true",
            "vllm/vllm-openai",
            "vllm",
            "serve",
        ],
    ],
)
def test_variables_around_the_line_count(words: Sequence[str], capsys: Capsys) -> None:
    line = ("Qwen/Qwen3-8B", "--max-model-len", "131072")
    plain = plan(capsys, "--gpu", "H100", "--json", "--", "vllm", "serve", *line)
    around = plan(capsys, "--gpu", "H100", "--json", "--", *words, *line)

    assert (plain.status, around.status) == (1, 0)
    # The first model runner has the logits three times in 32 bits.
    assert around.document["activation_bytes"]["low"] > 2 * plain.document["activation_bytes"]["low"]


def test_graphs_that_are_not_estimated_leave_more_cache(capsys: Capsys) -> None:
    words = ("--model", "Qwen/Qwen3-8B", "--gpu", "H100", "--vllm-version", "0.21", "--json")
    plain = plan(capsys, *words).document
    switched_off = plan(capsys, *words, "--vllm-env", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0").document

    assert switched_off["kv_cache_bytes"]["low"] > plain["kv_cache_bytes"]["low"]
    assert plan(capsys, *words, "--vllm-env", "HF_TOKEN=1").status == 2


def test_yarn_multiplies_the_original_length_until_its_factor_was_left_out(capsys: Capsys) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    words = ("--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--hf-overrides", json.dumps({"rope_scaling": yarn}))

    old, new = (plan(capsys, *words, "--json", "--vllm-version", version).document for version in ("0.29", "0.30"))
    assert (old["max_model_len"], new["max_model_len"]) == (131_072, 40_960)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["python3", "train.py"], "the line: there is no `vllm serve` in it"),
        (["llm.yaml"], "-- llm.yaml: there is no such file"),
        (["deploy/llm.yaml"], "-- deploy/llm.yaml: there is no such file"),
        (["vllm serve 'Qwen/Qwen3-8B"], "the line: No closing quotation in"),
        (["999999999"], "-- 999999999: no command line of such a process can be read"),
        (
            ["vllm", "serve", "Qwen/Qwen3-8B", "--config", "/nonexistent.yaml"],
            "--config /nonexistent.yaml: No such file",
        ),
        (["vllm serve " + "x" * 50_000], "the line: more than 32768 characters in 'vllm serve"),
        (["docker run " + "-e A=1 " * 99 + "nginx"], "the line: there is no `vllm serve` in it"),
    ],
)
def test_what_is_no_line_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(BadOptions) as refusal:
        read_serve_line(words)

    assert str(refusal.value).startswith(problem)


@pytest.mark.parametrize("text", ["image: nginx\nargs: [a]\n", "image: x\ncommand: vllm 'serve\n", "\0", "", "nothing"])
def test_a_file_without_a_line_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text(text)

    with pytest.raises(BadOptions):
        read_serve_line([str(file)])


def test_a_running_process_has_the_line(tmp_path: Path) -> None:
    script = tmp_path / "api_server.py"
    script.write_text("print(flush=True)\ninput()\n")
    command = [sys.executable, str(script), "--model", "Qwen/Qwen3-32B", "-tp", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # until then the kernel may show no command
            assert read_serve_line([str(process.pid)]) == ["--model", "Qwen/Qwen3-32B", "-tp", "2"]
        finally:
            process.kill()
    with pytest.raises(BadOptions, match=f"^process {os.getpid()}: it runs no `vllm serve`$"):
        read_serve_line([str(os.getpid())])


def test_a_file_of_options_comes_before_the_line(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: Qwen/Qwen3-32B\ntensor_parallel_size: 4\nmax-model-len: 8192\nenforce-eager: true\n"
        "enable-lora: false\nspeculative-config: {method: ngram}\nserved-model-name: [a, b]\n"
    )
    answer = plan(capsys, "--gpu", "8xH100", "--json", "--", "vllm", "serve", "--config", str(file), "-tp", "2")
    line = ("--model", "Qwen/Qwen3-32B", "-tp", "2", "--max-model-len", "8192", "--enforce-eager")
    by_line = plan(capsys, "--gpu", "H100", "--json", *line)

    assert answer.document["largest_max_model_len"] == by_line.document["largest_max_model_len"]
    assert "--served-model-name" in plan(capsys, "--gpu", "H100", "--", "vllm", "serve", "--config", str(file)).out


def test_an_option_before_the_line_replaces_it_and_in_it_the_last_counts(capsys: Capsys) -> None:
    line = ("--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "1k", "--max-model-len", "2k")

    assert plan(capsys, "--gpu", "H100", "--json", *line).document["max_model_len"] == 2000
    replaced = plan(capsys, "--gpu", "H100", "--max-model-len", "3k", "--json", *line)
    assert replaced.document["max_model_len"] == 3000


def test_a_line_on_named_cards_uses_the_number_in_the_line(capsys: Capsys) -> None:
    answer = plan(capsys, "--gpu", "8xH100", "--", "vllm", "serve", "Qwen/Qwen3-8B")

    assert "On 1 GPU, 79.65 GiB, vLLM 0.33." in answer.out


RECIPES = """\
vllm serve deepseek-ai/DeepSeek-V3.1 --enable-expert-parallel --tensor-parallel-size 8 --served-model-name ds31
vllm serve moonshotai/Kimi-K2-Instruct --trust-remote-code --tokenizer-mode auto -tp 8 -dp 2 --tool-call-parser kimi_k2
vllm serve openai/gpt-oss-120b --speculative-config.method eagle3 --speculative-config.model nvidia/gpt-oss-120b-Eagle3
vllm serve Qwen/Qwen3-VL-235B-A22B-Instruct -tp 8 --limit-mm-per-prompt.video 0 --mm-encoder-tp-mode data -ep -asc 4
vllm serve Qwen/Qwen3.5-397B-A17B -dp 8 -ep --language-model-only --reasoning-parser qwen3 --no-enable-prefix-caching
vllm serve deepseek-ai/DeepSeek-V3.1 -tp 8 --speculative-config '{"method":"mtp","num_speculative_tokens":3}' -cc.mode 3
vllm serve nvidia/Qwen3-235B-A22B-NVFP4 -q modelopt_fp4 --kv-cache-dtype fp8 --async-scheduling
"""


@pytest.mark.parametrize("line", RECIPES.splitlines())
def test_lines_as_people_paste_them_are_understood(line: str, capsys: Capsys) -> None:
    answer = plan(capsys, "--gpu", "B200", "--json", "--", line)

    assert answer.err == ""
    assert json.loads(answer.out)["data"]["bytes_per_token"] > 0


def test_an_option_of_no_release_is_refused_with_the_nearest(capsys: Capsys) -> None:
    answer = plan(capsys, "--gpu", "H100", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--disable-log-requests")

    assert answer.status == 2
    assert "--disable-log-requests: not an option of plan or of vLLM 0.19 to 0.33, did you mean" in answer.err
