"""The real process with a model's configuration: the KV cache in bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.process import daemon
from tests.unit.sizing.models import FOLDER as MODELS

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
"""Of a server that was given 1 GiB for the KV cache of the tiny model."""


def test_bytes_of_the_kv_cache_come_from_the_models_configuration() -> None:
    with EngineServer(page(RECORDED)) as engine:
        settings = {"ENGINE_URL": engine.url, "SAMPLE_INTERVAL_SECONDS": "1", "MODEL_CONFIG": str(MODELS / "tiny.json")}
        with daemon(**settings) as running:
            seen_page = running.sees(
                lambda shown_page: shown_page.has("engine_kv_cache_capacity_bytes"), "the size is known"
            )

            assert seen_page.value("engine_kv_cache_capacity_bytes") == 2**30
            assert seen_page.value("input_available", input="kv_cache_dtype") == 1

            engine.answer = page(RECORDED.replace('cache_dtype="auto"', 'cache_dtype="fp8"', 1))
            running.sees(
                lambda shown_page: shown_page.value("engine_kv_cache_capacity_bytes") == 2**29, "half as many with FP8"
            )

            engine.answer = page(RECORDED.replace('cache_dtype="auto"', 'cache_dtype="of tomorrow"', 1))
            running.sees(
                lambda shown_page: not shown_page.has("engine_kv_cache_capacity_bytes"), "a dtype that is not known"
            )


def test_a_model_with_windows_is_known_in_tokens_only_and_the_log_says_so() -> None:
    with EngineServer(page(RECORDED)) as engine:
        settings = {
            "ENGINE_URL": engine.url,
            "SAMPLE_INTERVAL_SECONDS": "1",
            "MODEL_CONFIG": str(MODELS / "gemma-2-9b.json"),
        }
        with daemon(**settings) as running:
            seen_page = running.sees(
                lambda shown_page: shown_page.has("engine_kv_cache_capacity_tokens"), "the engine is read"
            )

            assert not seen_page.has("engine_kv_cache_capacity_bytes")
            assert running.log().count("KV cache known in tokens only") == 1


def test_a_configuration_that_cannot_be_read_ends_the_daemon_with_status_2(tmp_path: Path) -> None:
    words = ("--model-config", str(tmp_path / "config.json"))
    process = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", *words], capture_output=True, text=True, check=False, timeout=60
    )

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.count("\n") == 1
    assert "it cannot be read: No such file or directory" in process.stderr
