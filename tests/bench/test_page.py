"""What a view of the page for people costs."""

from __future__ import annotations

import time

import pytest

from tests.bench.results import Results
from tests.unit.expose.views import day
from vllm_headroom.expose.page import render_page

pytestmark = pytest.mark.bench


def test_a_view_of_eight_gpus(results: Results) -> None:
    """Take the least of many: what runs beside it on the machine only ever adds to it."""
    view, cpu = day(gpus=8, leaking=frozenset({3})), list[float]()
    for _ in range(300):
        began = time.thread_time()
        page = render_page(view)
        cpu.append(1e3 * (time.thread_time() - began))

    results.at_most(5, "CPU of a view of the page, 8 GPUs", min(cpu), " ms")
    results.at_most(90, "its size", len(page.encode()) / 1e3, " kB")
