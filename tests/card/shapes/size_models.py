# ruff: noqa: PLC0415 - vLLM is imported once torch was instructed not to bind the CUDA runtime
"""Let vLLM size models, each in a child of this process, until it has said what it measured. Run by vLLM's Python.

The file that it is given has a list of cases: a model's folder, vLLM's options, the file for its log, and its
environment. The children are forked once vLLM is imported, which takes longer than all that a small model needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

count_devices = torch.cuda.device_count
LAST_WORDS = "for peak activation, and"
"""Of the line with which a worker ends its start."""

STARTED = "The engine has started."
"""What we log: a model that keeps nothing of a sequence is not profiled."""


def start_engine(case: dict[str, Any]) -> None:
    """Start the engine that vLLM's server would start, in this process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    torch.cuda.device_count = count_devices
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    options = ["--model", case["folder"], "--load-format", "dummy", *case["options"]]
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(options))
    LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    os.write(1, f"{STARTED}\n".encode())


def fork_engine(case: dict[str, Any]) -> int:
    """Return the child that starts the engine, with all its output in the log."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.environ.update(case["environment"])
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        start_engine(case)
    except BaseException:  # noqa: BLE001 - a refusal is an answer as well
        traceback.print_exc()
    os._exit(0)


def size_model(case: dict[str, Any]) -> None:
    """Start one engine, and end it as soon as it has said all, or after its time."""
    child, ends, done = fork_engine(case), time.monotonic() + case["seconds"], 0
    log = Path(case["log"])
    while not done and time.monotonic() < ends:
        time.sleep(0.5)
        done = os.waitpid(child, os.WNOHANG)[0]
        if log.exists() and LAST_WORDS in log.read_text(errors="replace"):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)


def import_vllm() -> None:
    """Import vLLM once for all children, and let nothing in it bind the CUDA runtime to this process."""
    torch.cuda.device_count = lambda: 1
    import vllm.v1.engine.llm_engine  # noqa: F401


if __name__ == "__main__":  # workers of tensor parallelism import this file
    import_vllm()
    for load in json.loads(Path(sys.argv[1]).read_text()):
        size_model(load)
        sys.stdout.write(f"{load['name']}\n")
        sys.stdout.flush()
