"""The command `run`: the daemon."""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from vllm_headroom.config.settings import Settings
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.run.process import hand_over

DESCRIPTION: Final = """\
Reads a vLLM server's metrics and the GPUs' memory side by side, and serves what
is reported, what is really held and what is left, for Prometheus, at /metrics.
"""

EPILOG: Final = """\
Example:
  vllm-headroom --engine-url http://127.0.0.1:8000 --gpus 0,1
  curl http://127.0.0.1:9839/metrics

It ends with status 0 on SIGTERM or SIGINT, 2 when it cannot use its settings,
3 when only a new container can mend the driver, 1 on an error of its own.
"""


def _run(given: Namespace) -> int:
    hand_over(given.settings.values())
    return 0


COMMAND: Final[Command[int]] = Command(
    usage="vllm-headroom [run] [OPTION VALUE]...\n       vllm-headroom COMMAND [OPTION VALUE]...",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=lambda parser: parser.add_settings(Settings),
    run=_run,
    status=int,
)
