"""The real daemon over a folder that a probe writes to."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.process import daemon

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
OFTEN = {"SAMPLE_INTERVAL_SECONDS": "1", "GPU_SAMPLE_INTERVAL_SECONDS": "0.5"}


def write(folder: Path, reserved_gib: int) -> None:
    document = {
        "headroom_probe": 1,
        "t": time.time(),
        "interval_seconds": 100.0,
        "pid": 7,
        "started_at": time.time() - 60,
        "role": "worker",
        "devices": [
            {
                "uuid": "GPU-a",
                "allocated": 10 * GIB,
                "reserved": reserved_gib * GIB,
                "inactive_split": 1 * GIB,
                "retries": 3,
                "ooms": 0,
            }
        ],
        "parts": {"weights": 4 * GIB, "kv_cache": 5 * GIB},
        "scheduler": {"steps_total": 9},
    }
    (folder / "7-1000.json.tmp").write_text(json.dumps(document))
    (folder / "7-1000.json.tmp").replace(folder / "7-1000.json")


def test_what_the_probe_says_is_on_the_page_and_goes_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    folder.mkdir()
    nvml = FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a", used_bytes=14 * GIB)])
    settings = {"GPUS": "GPU-a", "PROBE_DIR": str(folder), **OFTEN, **nvml.environment()}
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **settings) as running:
        running.sees(lambda shown_page: shown_page.value("source_up", source="probe") == 0, "no probe has written yet")

        write(folder, 12)
        seen_page = running.sees(lambda shown_page: shown_page.has("engine_memory_bytes"), "the probe is read")

        parts = ("weights", "kv_cache", "other_tensors", "fragmented", "cached", "outside_torch")
        assert [seen_page.value("engine_memory_bytes", part=part) / GIB for part in parts] == [4, 5, 1, 1, 1, 2]
        assert seen_page.value("memory_reported_bytes", uuid="GPU-a", basis="probe") == 12 * GIB
        assert seen_page.value("memory_discrepancy_bytes", uuid="GPU-a", basis="probe") == 2 * GIB
        assert seen_page.value("allocator_retries_total") == 3
        shutil.rmtree(folder)
        gone_page = running.sees(lambda shown_page: not shown_page.has("engine_memory_bytes"), "the folder is gone")
        assert gone_page.value("source_failures_total", source="probe", reason="unavailable") >= 1
        assert gone_page.value("source_up", source="engine") == 1
