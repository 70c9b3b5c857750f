"""The command `demo`: the daemon over a simulated engine and GPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.demo.scenario import TABLE
from vllm_headroom.commands.demo.settings import DemoSettings
from vllm_headroom.config.options import Parser

DESCRIPTION: Final = """\
Runs the daemon over a simulated engine and GPU: it needs and reads no real one.
"""

EPILOG: Final = """\
Example:
  vllm-headroom demo --scenario burst --speed 10
  curl http://127.0.0.1:9839/metrics
"""


def _options(parser: Parser) -> None:
    parser.add_settings(DemoSettings)


async def _run(given: Namespace) -> int:
    from vllm_headroom.commands.demo.run import run  # noqa: PLC0415 - --help need not wait for a web server
    from vllm_headroom.daemon import logs  # noqa: PLC0415 - the same

    settings: DemoSettings = given.settings
    logs.configure(settings.log_format, settings.log_level)
    return await run(settings.values(), scenario=TABLE[settings.scenario], speed=settings.speed)


COMMAND: Final[Command[int]] = Command(
    usage="vllm-headroom demo [OPTION VALUE]...",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=_options,
    run=_run,
    status=int,
)
