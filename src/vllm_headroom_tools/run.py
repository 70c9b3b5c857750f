"""The command `run`: the daemon."""

import gc
from argparse import Namespace
from typing import Final, NoReturn

from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.early import pause_collection
from vllm_headroom_tools.settings import ModelSettings


def _run(arguments: Namespace) -> NoReturn:
    """Serve until a signal ends the process; raise SystemExit with the daemon's exit status."""
    with pause_collection():
        # --help and --print-config do not need the daemon.
        from vllm_headroom.daemon import app, node_daemon  # noqa: PLC0415 - see above
    # Imported modules are never freed. A full collection would visit all objects of these modules.
    # The visit takes 25 ms and would delay scrapes.
    gc.freeze()
    settings: ModelSettings = arguments.settings
    if settings.engines is not None:
        node_daemon.serve(settings, settings.model_reader)
    app.serve(settings, settings.model_reader)


COMMAND: Final[Command] = Command(
    usage="vllm-headroom [run] [OPTION VALUE]...\n       vllm-headroom COMMAND [OPTION VALUE]...",
    description="""\
Reads a vLLM server's metrics and the GPUs' memory side by side, and serves what
is reported, what is really held and what is left, for Prometheus, at /metrics.
""",
    epilog="""\
Example:
  vllm-headroom --engine-url http://127.0.0.1:8000 --gpus 0,1
  curl http://127.0.0.1:9839/metrics

It ends with status 0 on SIGTERM or SIGINT, 2 when it cannot use its settings,
3 when only a new container can reach the driver, 1 on an internal error.
""",
    options=lambda parser: parser.add_settings(ModelSettings),
    run=_run,
    has_report=False,
)
