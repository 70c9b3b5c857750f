"""A look at a sidecar in the terminal."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console, Group

from tests.unit.expose.views import day, host_day
from vllm_headroom.expose.snapshot import build_document
from vllm_headroom.expose.view import View
from vllm_headroom_tools.watch import draw_frame


def drawn(view: View, width: int = 60) -> str:
    return looked_at(json.loads(json.dumps(build_document(view))), width)


def looked_at(document: dict[str, Any], width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(Group(*draw_frame(document, "gpu-7", width)))
    return captured.get()


def test_the_verdict_and_the_time_left_are_written() -> None:
    shown = drawn(day(leaking=frozenset({0})), width=100)

    assert "  ALARM: GPU 0 leaking" in shown.splitlines()[0], "as the page's headline"
    assert "ALARM      GPU 0 leaks: out of memory in 2 h 0 min at the earliest, likely in about 4 h 0 min." in shown
    assert "full in 4 h 0 min; the last 23 h 59 min, on a scale from 0" in shown


def test_instances_of_one_gpu_are_distinguished() -> None:
    document = json.loads(json.dumps(build_document(day(gpus=2))))
    for gpu, curve, uuid in zip(
        document["gpus"], document["history"]["gpus"], ("MIG-1234567890", "MIG-abcdefghij"), strict=True
    ):
        gpu["gpu"], gpu["uuid"], curve["uuid"] = "1", uuid, uuid
        gpu["info"]["attribution"] = "process"

    shown = looked_at(document)

    assert "GPU 1 MIG-12345678: " in shown
    assert "GPU 1 MIG-abcdefgh: " in shown


def test_free_host_memory_is_drawn_and_is_not_asked_of_an_earlier_sidecar() -> None:
    document = json.loads(json.dumps(build_document(host_day())))

    assert "host memory: 4 GiB free, full in 4 min 0 s; the last 1 h 0 min, on a scale from 0" in looked_at(
        document, 100
    )
    del document["history"]["host_free_bytes"]
    assert "host memory: " not in looked_at(document, 100)


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (20, 40, 80, 200):
        assert max(len(line) for line in drawn(day(gpus=2, leaking=frozenset({1})), width).splitlines()) <= width
