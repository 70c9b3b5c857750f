"""The command: which subcommand, and how the daemon's loop is run."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from vllm_headroom.config.settings import Settings

AnySettings = TypeVar("AnySettings", bound="Settings")

BAD_INPUT: Final = 2

USAGE: Final = """\
Usage: vllm-headroom [run] [OPTION VALUE]...
       vllm-headroom COMMAND [OPTION VALUE]...

Reads a vLLM server's metrics and the GPUs' memory side by side, and serves what
is reported, what is really held and what is left, for Prometheus, at /metrics.

Commands; each says more with --help:
{commands}

Example:
  vllm-headroom --engine-url http://127.0.0.1:8000 --gpus 0,1
  curl http://127.0.0.1:9839/metrics

It ends with status 0 on SIGTERM or SIGINT, 2 when it cannot use its settings,
3 when only a new container can mend the driver, 1 on an error of its own.
"""

DEMO_USAGE: Final = """\
Usage: vllm-headroom demo [OPTION VALUE]...

Runs the daemon over a simulated engine and GPU: it needs and reads no real one.

Example:
  vllm-headroom demo --scenario burst --speed 10
  curl http://127.0.0.1:9839/metrics
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: what it does, in a line, and the function that takes the words after its name."""

    summary: str
    start: Callable[[Sequence[str]], int]


def main() -> int:
    """Run the command that the process was started with; return the exit status."""
    words = sys.argv[1:]
    if "--version" in words:
        sys.stdout.write(f"vllm-headroom {metadata.version('vllm-headroom')}\n")
        return 0
    name, rest = ("run", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    if name not in COMMANDS:
        sys.stderr.write(f"{name!r}: not a command, accepts {', '.join(COMMANDS)}\n")
        return BAD_INPUT
    return COMMANDS[name].start(rest)


def _run(words: Sequence[str]) -> int:
    _end_on_signals()
    from vllm_headroom.config.settings import Settings  # noqa: PLC0415 - each command imports what it needs, and no more

    async def serve(settings: Settings) -> int:
        from vllm_headroom.daemon import app  # noqa: PLC0415 - the same

        return await app.serve(settings)

    commands = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return _daemon(words, Settings, serve, USAGE.format(commands=commands))


def _demo(words: Sequence[str]) -> int:
    _end_on_signals()
    from vllm_headroom.commands import demo  # noqa: PLC0415 - the same
    from vllm_headroom.commands.demo.settings import DemoSettings  # noqa: PLC0415 - the same

    async def serve(settings: DemoSettings) -> int:
        return await demo.serve(settings, scenario=settings.scenario, speed=settings.speed)

    return _daemon(words, DemoSettings, serve, DEMO_USAGE)


def _doctor(words: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vllm_headroom.commands.doctor.usage import USAGE as DOCTOR_USAGE  # noqa: PLC0415 - the same
    from vllm_headroom.config.settings import Settings  # noqa: PLC0415 - the same

    async def look(settings: Settings) -> int:
        from vllm_headroom.commands.doctor import command  # noqa: PLC0415 - the same

        return await command.serve(settings, as_json="--json" in words)

    return _daemon([word for word in words if word != "--json"], Settings, look, DOCTOR_USAGE)


def _smoke(words: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vllm_headroom.commands.smoke import settings as own  # noqa: PLC0415 - the same

    async def serve(settings: own.SmokeSettings) -> int:
        from vllm_headroom.commands.smoke import command  # noqa: PLC0415 - the same

        return await command.serve(settings, as_json="--json" in words)

    return _daemon([word for word in words if word != "--json"], own.SmokeSettings, serve, own.USAGE)


def _package(name: str) -> Callable[[Sequence[str]], int]:
    """Return the start of a command that reads its options by itself; nothing is imported before it is called."""

    def start(words: Sequence[str]) -> int:
        return int(importlib.import_module(f"vllm_headroom.commands.{name}.command").start(words))

    return start


def _daemon(
    words: Sequence[str],
    kind: type[AnySettings],
    serve: Callable[[AnySettings], Coroutine[Any, Any, int]],
    usage: str,
) -> int:
    from vllm_headroom.config.load import SettingsError, load_as  # noqa: PLC0415 - the same
    from vllm_headroom.config.text import settings_help, settings_yaml  # noqa: PLC0415 - the same

    if "-h" in words or "--help" in words:
        sys.stdout.write(f"{usage}\n{settings_help(kind)}\n")
        return 0
    try:
        settings = load_as(kind, [word for word in words if word != "--print-config"], os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    if "--print-config" in words:
        sys.stdout.write(settings_yaml(settings))
        return 0
    return _live(serve(settings), settings)


def _live(daemon: Coroutine[Any, Any, int], settings: Settings) -> NoReturn:
    """Run the daemon on uvloop and end the process with its status; an error of its own is raised.

    The loop is left open: closing it waits for a resolver that does not answer (10 s, measured), and SIGTERM may not.
    """
    import uvloop  # noqa: PLC0415 - the same

    from vllm_headroom.daemon import logs  # noqa: PLC0415 - the same

    logs.configure(settings.log_format, settings.log_level)
    status = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(daemon)
    logging.shutdown()
    os._exit(status)


def _end_on_signals() -> None:
    """Let a signal that comes before the loop listens to them end the process with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


COMMANDS: Final = {
    "run": Command(summary="The daemon, beside a vLLM server; what runs without a command.", start=_run),
    "demo": Command(summary="The daemon over a simulated engine and GPU, to look at.", start=_demo),
    "doctor": Command(summary="What the daemon can see from here, and what to do about the rest.", start=_doctor),
    "plan": Command(summary="Whether a model will fit, and what to change.", start=_package("plan")),
    "preflight": Command(summary="Whether vLLM would start on these GPUs now.", start=_package("preflight")),
    "smoke": Command(summary="Whether a vLLM that was just started serves.", start=_smoke),
    "load": Command(summary="A bounded load on a server you name, with its memory watched.", start=_package("load")),
    "check": Command(summary="Whether a trace keeps its limits: the gate for CI.", start=_package("check")),
    "advise": Command(summary="Which cause fits, and which option of vLLM mends it.", start=_package("advise")),
    "replay": Command(summary="The leak detector over a recorded past.", start=_package("replay")),
}

if __name__ == "__main__":
    sys.exit(main())
