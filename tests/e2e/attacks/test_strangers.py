"""A process that calls itself the engine is not the engine."""

from __future__ import annotations

from pathlib import Path

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.vllm_processes import serving
from tests.process import Page, daemon

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()


def read_held_bytes(page: Page, holder: str) -> float:
    return page.value("gpu_memory_held_bytes", uuid="GPU-a", holder=holder)


def test_a_stranger_with_the_engines_name_and_port_takes_nothing_from_the_ledger(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    (gpu,) = nvml.gpus
    with EngineServer(page(RECORDED)) as engine, serving(ours, engine.port) as core:
        gpu.processes, gpu.used_bytes = {core: GIB}, 4 * GIB
        nvml.write()
        settings = {"ENGINE_URL": engine.url, "SAMPLE_INTERVAL_SECONDS": "0.5", **nvml.environment()}
        with daemon(**settings) as running:
            running.sees(lambda page: read_held_bytes(page, "engine") == GIB, "the engine's memory is known")
            with serving(theirs, engine.port) as stranger:
                gpu.processes = {core: GIB, stranger: 2 * GIB}
                nvml.write()
                seen_page = running.sees(
                    lambda page: read_held_bytes(page, "other") == 2 * GIB, "the stranger's is another's"
                )

                assert read_held_bytes(seen_page, "engine") == GIB
                assert seen_page.value("gpu_info", uuid="GPU-a", attribution="process") == 1
