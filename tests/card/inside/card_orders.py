"""A plugin of vLLM: the process that has the worker obeys the orders of a test; run by the Python that vLLM is in.

An order is a file in the folder CARD_ORDERS, `WORD.NUMBER` with the bytes or the count that it takes; the answer is
`WORD.NUMBER.done`, JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
kept: list[Any] = []
steps: list[list[Any]] = []


def keep_tensors(amount: int) -> dict[str, Any]:
    """Keep tensors of 1 MiB, as a leak does."""
    for _ in range(amount // MIB):
        kept.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))  # noqa: PERF401 - the line that a record names
    return {"kept": len(kept)}


def keep_outside(amount: int) -> dict[str, Any]:
    """Allocate past torch, as NCCL or a C library does."""
    runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    return {"error": runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(amount))}


def keep_fragments(amount: int) -> dict[str, Any]:
    """Fill segments with two sizes in turn and free the larger: what is left cannot serve a large tensor."""
    blocks = [
        torch.empty(size, dtype=torch.uint8, device="cuda")
        for _ in range(amount // (20 * MIB))
        for size in (17 * MIB, 3 * MIB)
    ]
    kept.extend(blocks[1::2])
    return {"kept": len(kept)}


def free_all(amount: int) -> dict[str, Any]:
    kept.clear()
    gc.collect()
    if amount:
        torch.cuda.empty_cache()
    return {}


def fail(amount: int) -> dict[str, Any]:
    """Ask torch for more than there is; the error is caught, as by a server that answers 500."""
    try:
        torch.empty(amount, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        return {"error": str(error)}
    return {}


def break_card(_: int) -> dict[str, Any]:
    """Have the card fail from now on, as after a kernel that read outside its memory."""
    ctypes.CDLL("libcudart.so.13").card_break()
    return {}


def raise_in_core(_: int) -> dict[str, Any]:
    """Raise an exception between two lines of the core's own loop."""
    main_thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main_thread, ctypes.py_object(AssertionError))
    return {}


def keep_on_host(amount: int) -> dict[str, Any]:
    """Keep pages of host memory, as a cache of images does."""
    kept.append(bytearray(os.urandom(MIB)) * (amount // MIB))
    return {}


def hold_next_step(seconds: int) -> dict[str, Any]:
    """Have the next step take so much longer, so that vLLM computes together what arrives meanwhile."""
    runner = sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner
    prepare = runner._prepare_inputs

    def sleep_first(*positions: Any, **options: Any) -> Any:
        runner._prepare_inputs = prepare
        time.sleep(seconds)
        return prepare(*positions, **options)

    runner._prepare_inputs = sleep_first
    return {}


def read_stats(_: int) -> dict[str, Any]:
    stats = torch.cuda.memory_stats()
    return {name: stats[name] for name in stats if name.endswith(("all.current", "num_alloc_retries", "num_ooms"))}


def read_peaks(_: int) -> dict[str, Any]:
    """Return torch's own peak of each half of a step since the last order, as `watch_steps` has read it."""
    read, steps[:] = list(steps), []
    return {"steps": read}


ORDERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "tensors": keep_tensors,
    "outside": keep_outside,
    "fragments": keep_fragments,
    "free": free_all,
    "fail": fail,
    "break": break_card,
    "raise": raise_in_core,
    "host": keep_on_host,
    "hold": hold_next_step,
    "stats": read_stats,
    "peaks": read_peaks,
}


def obey(folder: Path) -> None:
    while True:
        for order in sorted(folder.glob("*.[0-9]*")):
            done = order.with_name(f"{order.name}.done")
            if order.suffix != ".done" and not done.exists():
                unfinished = folder / "answer"
                unfinished.write_text(json.dumps(ORDERS[order.name.partition(".")[0]](int(order.read_text()))))
                unfinished.replace(done)
        time.sleep(0.1)


def count_on_host() -> None:
    """Have adapters counted on the host: vLLM reads that count back from a kernel, which computes nothing here."""
    unique = torch.unique

    def count(tensor: torch.Tensor, *positions: Any, **options: Any) -> Any:
        counted = unique(tensor.cpu(), *positions, **options)
        is_one = isinstance(counted, torch.Tensor)
        return counted.to(tensor.device) if is_one else tuple(part.to(tensor.device) for part in counted)

    torch.unique = count


def register() -> None:
    """Wait for the worker of this process, if any, and obey orders from then on; vLLM calls this in each process."""
    if folder := os.environ.get("CARD_ORDERS"):
        count_on_host()
        threading.Thread(target=wait_for_card, args=(Path(folder),), daemon=True).start()


def watch_steps() -> None:
    """Read torch's peak around each half of a step, within the probe's wrapper: by its documented functions."""
    while (runner := getattr(sys.modules.get("vllm.v1.worker.gpu_model_runner"), "GPUModelRunner", None)) is None:
        time.sleep(0.1)
    resting = [0]

    def watch(half: str) -> None:
        call = getattr(runner, half)

        def measure(self: Any, *positions: Any, **options: Any) -> Any:
            began = time.time()
            if half == "execute_model":
                resting[0] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            answer = call(self, *positions, **options)
            steps.append([began, half, torch.cuda.max_memory_allocated() - resting[0]])
            return answer

        setattr(runner, half, measure)

    watch("execute_model")
    watch("sample_tokens")


def sample_zeros() -> None:
    """Have each token be 0, drafted ones too: a copy from the card leaves in the host's memory what was there."""
    name = "vllm.v1.worker.gpu_model_runner"
    while not hasattr(sys.modules.get(name), "GPUModelRunner"):
        time.sleep(0.1)
    module: Any = sys.modules[name]
    parse = module.RejectionSampler.parse_output

    def parse_zeros(tokens: torch.Tensor, *positions: Any, **options: Any) -> Any:
        return parse(torch.zeros(tokens.shape, dtype=tokens.dtype), *positions, **options)

    module.RejectionSampler.parse_output = staticmethod(parse_zeros)
    module.GPUModelRunner._to_list = lambda _, tokens: [[0] for _ in range(len(tokens))]


def wait_for_card(folder: Path) -> None:
    while not torch.cuda.is_initialized():
        time.sleep(0.5)
    if os.environ.get("CARD_SAMPLES_ZEROS"):
        sample_zeros()
    if os.environ.get("CARD_WATCHES_STEPS"):
        watch_steps()
    obey(folder)
