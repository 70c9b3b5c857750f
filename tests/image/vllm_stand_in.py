"""Replaces vLLM in a container: its page, and two processes that look like its own.

usage: python3 /usr/local/bin/vllm serve, with this file as `vllm`, tests/ on PYTHONPATH and a page in PAGE.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes.engine_server import EngineServer, page

PORT = 8000


def main() -> None:
    """Serve until SIGTERM; the log says which process holds the GPU's memory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    core = subprocess.Popen(["VLLM::EngineCore", "infinity"], executable="/bin/sleep")
    with EngineServer(page(Path(os.environ["PAGE"]).read_text(encoding="utf-8")), port=PORT):
        sys.stdout.write(f"the engine core is process {core.pid}\n")
        sys.stdout.flush()
        core.wait()


if __name__ == "__main__":
    main()
