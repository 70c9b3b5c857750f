"""A real vLLM under load beside GPUs that follow a file: the states are as the file says. Takes 20 minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.serving import Engine, words
from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeNvml
from tests.process import Daemon, Page, daemon

pytestmark = pytest.mark.engine

BASE = 72 * GIB
BYTES_PER_REQUEST = MIB
"""So little that the card is far from full at the end: near that another rule alarms, which has no rate per request."""
MINUTES = 20


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-flat", used_bytes=BASE), FakeGpu(uuid="GPU-leak", used_bytes=BASE)])


@pytest.fixture
def sidecar(engine: Engine, nvml: FakeNvml) -> Iterator[Daemon]:
    settings = {"ENGINE_URL": engine.url, "GPUS": "0,1", **nvml.environment()}
    with daemon(**settings) as running:
        yield running


def state(page: Page, uuid: str) -> set[str]:
    states = ("unknown", "warming_up", "unsettled", "stable", "growing", "leaking", "asleep")
    return {name for name in states if page.value("leak_state", uuid=uuid, state=name) == 1}


def test_a_gpu_that_grows_with_the_requests_is_growing_and_one_that_does_not_is_stable(
    engine: Engine, sidecar: Daemon, nvml: FakeNvml
) -> None:
    done, over = [0], threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            engine.complete(words(37 * number + done[0], 32), 16)
            done[0] += 1
            over.wait(1.0)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for client_thread in clients:
        client_thread.start()
    seen_states: dict[str, list[str]] = {"GPU-flat": [], "GPU-leak": []}
    try:
        ends = time.monotonic() + 60 * MINUTES
        while time.monotonic() < ends:
            nvml.gpus[1].used_bytes = BASE + done[0] * BYTES_PER_REQUEST // (2 * MIB) * (2 * MIB)
            nvml.write()
            page = sidecar.page()
            for uuid, states in seen_states.items():
                if page.has("leak_state", uuid=uuid) and (not states or {states[-1]} != state(page, uuid)):
                    states.extend(state(page, uuid))
            time.sleep(2)
    finally:
        over.set()
        for client_thread in clients:
            client_thread.join()
    print(  # noqa: T201 - the record of a long run
        seen_states,
        "requests",
        done[0],
        "bytes per request",
        page.text.split("headroom_leak_bytes_per_request{")[-1][:80],
    )

    assert not {"growing", "leaking"} & set(seen_states["GPU-flat"])
    assert seen_states["GPU-leak"][-1] in {"growing", "leaking"}
    assert page.value("leak_bytes_per_request", uuid="GPU-leak") == pytest.approx(BYTES_PER_REQUEST, rel=0.15)
