"""Replaces `vllm serve` in a separate process; arguments: serve MODEL --port PORT, as vLLM's."""

from __future__ import annotations

import sys
import threading

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.fakes.engine_server import EngineServer

if __name__ == "__main__":
    with EngineServer(busy(ONE_ENGINE), port=int(sys.argv[-1])):
        threading.Event().wait()
