"""As vllm/plugins/__init__.py of 0.32: once in each interpreter, and nothing guards the call."""

import importlib
import os
from importlib.metadata import entry_points

plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded  # noqa: PLW0603 - as vLLM has it
    if plugins_loaded:
        return
    plugins_loaded = True
    functions = [plugin.load() for plugin in entry_points(group="vllm.general_plugins")]
    if seconds := os.environ.get("FAKE_INTERVAL_SECONDS"):
        vars(importlib.import_module("vllm_headroom_probe.probe"))["INTERVAL_SECONDS"] = float(seconds)
    for function in functions:
        function()
