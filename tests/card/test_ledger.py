"""NVML's stand-in answers from the cards' ledger; needs no CUDA, so that `make test` has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pynvml
import pytest

from tests.card.card import GIB, HEADER, HOLDER, MAX_CARDS, MIB, Cards, name_uuid
from tests.fakes.nvml.library import FakeNvml


def write_holder(cards: Cards, row: int, pid: int, *held_bytes: int) -> None:
    with cards.ledger.open("r+b") as file:
        file.seek(HEADER.size + row * HOLDER.size)
        file.write(HOLDER.pack(pid, 0, 0, *held_bytes, *[0] * (MAX_CARDS - len(held_bytes))))


def load(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(cards.folder.parent).load(monkeypatch)
    for name, value in cards.environment().items():
        monkeypatch.setenv(name, value)
    pynvml.nvmlInit()


def read(card: int) -> tuple[int, dict[int, int]]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(card)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.used, {process.pid: process.usedGpuMemory for process in processes}


def test_each_card_has_its_own_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(folder=tmp_path / "cards", count=2).create()
    load(cards, monkeypatch)
    write_holder(cards, 0, os.getpid(), 3 * GIB, 5 * MIB)
    write_holder(cards, 7, os.getppid(), GIB)

    assert read(0) == (4 * GIB, {os.getpid(): 3 * GIB, os.getppid(): GIB})
    assert read(1) == (5 * MIB, {os.getpid(): 5 * MIB})
    assert cards.read_holders(1) == {os.getpid(): 5 * MIB}
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)) == name_uuid(1)


@pytest.mark.parametrize(("seconds", "left_bytes"), [(0, 0), (3600, GIB)])
def test_a_dead_process_gives_back_after_the_set_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, left_bytes: int
) -> None:
    cards = Cards(folder=tmp_path / "cards", reclaim_seconds=seconds).create()
    load(cards, monkeypatch)
    dead_process = subprocess.Popen(["true"])
    dead_process.wait()
    write_holder(cards, 0, dead_process.pid, GIB)

    assert read(0)[0] == left_bytes
