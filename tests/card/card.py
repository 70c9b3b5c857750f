"""Stand-in cards: their ledger, what a process needs in its environment to see them, and vLLM on top of them."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fakes.nvml.library import FakeGpu

FOLDER: Final = Path(os.environ.get("CARD_FOLDER", ".card")).resolve()
GIB: Final = 2**30
MIB: Final = 2**20
MAGIC: Final = 0x6865616472636172
MAX_CARDS: Final = 8
MAX_HOLDERS: Final = 256
VLLM: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""The environment of every vLLM here; FlashInfer's all-reduce shares memory among ranks, and ends the worker."""
HEADER: Final = struct.Struct(f"<5Q{MAX_CARDS}Q{MAX_CARDS}Q")
HOLDER: Final = struct.Struct(f"<iiQ{MAX_CARDS}Q")


def name_uuid(card: int) -> str:
    """The UUID of a card, the same from NVML and from the CUDA runtime."""
    return f"GPU-5ca1ab1e-0000-4000-8000-{card:012d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """Cards of one size, and the folder that has their ledger and NVML's control file.

    `reserved_bytes` is the driver's own share of `total_bytes`; `context_bytes` is what the context of a process takes,
    `collective_bytes` what a communicator of NCCL takes; a dead process keeps its memory for `reclaim_seconds`.
    """

    folder: Path
    count: int = 1
    total_bytes: int = 80 * GIB
    reserved_bytes: int = 600 * MIB
    context_bytes: int = 500 * MIB
    collective_bytes: int = 128 * MIB
    reclaim_seconds: int = 0

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def create(self) -> Cards:
        """Write the ledger, nothing held, and NVML's control file."""
        totals = [self.total_bytes - self.reserved_bytes] * self.count + [0] * (MAX_CARDS - self.count)
        facts = (MAGIC, self.count, self.context_bytes, self.collective_bytes, self.reclaim_seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ledger.write_bytes(HEADER.pack(*facts, *totals, *[0] * MAX_CARDS) + bytes(HOLDER.size * MAX_HOLDERS))
        gpus = (
            FakeGpu(
                uuid=name_uuid(card),
                total_bytes=self.total_bytes,
                reserved_bytes=self.reserved_bytes,
                utilization_percent=50,
            )
            for card in range(self.count)
        )
        lines = [f"ledger {self.ledger}", "driver 580.95.05", *(line for gpu in gpus for line in gpu.lines())]
        (self.folder / "nvml.txt").write_text("\n".join(lines) + "\n")
        return self

    def environment(self) -> dict[str, str]:
        """What a process needs to see the cards, vLLM and torch as well as a daemon."""
        libraries = [FOLDER / "driver", *FOLDER.glob("venv/lib/python3*/site-packages/nvidia/cu13/lib")]
        return {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "CARD_LEDGER": str(self.ledger),
            "NVML_FAKE_FILE": str(self.folder / "nvml.txt"),
        }

    def read_holders(self, card: int = 0) -> dict[int, int]:
        """The bytes that each process holds of a card, its context included; the dead that were not reclaimed too."""
        with self.ledger.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            rows = [HOLDER.unpack_from(view, HEADER.size + number * HOLDER.size) for number in range(MAX_HOLDERS)]
        return {row[0]: row[3 + card] for row in rows if row[0] > 0 and row[3 + card]}


@dataclass(slots=True)
class Engine:
    """A vLLM on the cards, which may still be starting."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serve(
    cards: Cards, model: Path, port: int, log: Path, options: Sequence[str] = (), **environment: str
) -> Iterator[Engine]:
    """Run vLLM with random weights; at the end all its processes are killed.

    Graphs are captured unless `options` has --enforce-eager. No kernel runs: each token is 0, so requests need
    "ignore_eos": true; and the second model runner, which counts sampled tokens in a kernel, would never end one.
    """
    fixed = VLLM | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it shares memory among ranks
    }
    vllm = [str(FOLDER / "venv/bin/vllm"), "serve", model.name, "--load-format", "dummy"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*vllm, "--host", "127.0.0.1", "--port", str(port), *options],
            cwd=model.parent,
            env={**os.environ, **cards.environment(), **fixed, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Engine(url=f"http://127.0.0.1:{port}", process=process, log=log)
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@contextmanager
def take(cards: Cards, held_bytes: int, card: int = 0) -> Iterator[int]:
    """Have another process hold so much of a card; yield its pid."""
    body = f"""
import ctypes, sys
runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
assert runtime.cudaSetDevice({card}) == 0
print(runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t({held_bytes})), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [FOLDER / "venv/bin/python", "-c", body],
        env={**os.environ, **cards.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n", "it fits"
        yield process.pid
        process.kill()
