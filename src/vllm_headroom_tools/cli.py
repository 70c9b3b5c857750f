"""What a command is, and the one way in which all of them are run."""

import importlib
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, NoReturn

from msgspec import Struct

from vllm_headroom.inputs import describe_unknown
from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.early import no_collection
from vllm_headroom_tools.options import BadOptions, Parser, Printed
from vllm_headroom_tools.terminal import render_line
from vllm_headroom_tools.trace import BadInput

PROGRAM: Final = "vllm-headroom"
HEADLINES: Final = {
    Conclusion.GOOD: "bold green",
    Conclusion.NOT_GOOD: "bold red",
    Conclusion.CANNOT_TELL: "bold yellow",
}
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run", "Runs the daemon beside a vLLM server; the default."),
    "demo": ("demo.command", "Runs the daemon over a simulated engine and GPU."),
    "doctor": (
        "doctor.command",
        "Shows what the daemon can see from here, and how to fix the rest.",
    ),
    "probe": ("probe", "Installs the probe into vLLM; records who allocates."),
    "plan": ("plan.command", "Computes whether a model will fit, and what to change if not."),
    "preflight": ("preflight.command", "Checks whether vLLM would start on these GPUs now."),
    "smoke": ("smoke.command", "Checks whether a vLLM that has just started serves."),
    "load": ("load.command", "Puts a bounded load on a server; watches its memory."),
    "check": ("check.command", "Checks whether a trace keeps its limits: a gate for CI."),
    "advise": ("advise.command", "Finds the cause that fits, and the vLLM option that fixes it."),
    "watch": ("watch", "Shows a sidecar's verdicts and figures, live in the terminal."),
    "postmortem": (
        "postmortem.command",
        "Explains what happened before the engine exited, and why.",
    ),
    "replay": ("replay.command", "Runs the leak detector over a recorded trace."),
    "help": ("help", "Shows the options of a command, or its man page."),
    "completion": ("completion", "Prints what bash, zsh or fish needs to complete words."),
}
"""The module of each command and what it does, in a line; nothing of a command is imported before it is called."""


class Command(Struct, frozen=True, kw_only=True):
    """A command: its options, and what it does with them.

    `run` returns its report, or its exit status where it has none to make; it raises BadInput or BadOptions.
    """

    usage: str
    description: str
    epilog: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace], Report | int | Coroutine[Any, Any, Report | int]]
    has_report: bool = True


def start(name: str, argv: Sequence[str]) -> NoReturn:
    """Run the command of this name and end the process; an error of ours is raised.

    The process ends without waiting for threads: one may wait for a resolver that does not answer (10 s, measured), and
    SIGTERM may not.
    """
    if name in COMMANDS and argv[:1] == [
        "--version"
    ]:  # a first word is no option's value, and needs no imports
        say(_version())
        status = 0
    elif name in COMMANDS:
        with no_collection():
            command = find_command(name)
        status = execute(command, name, argv)
    else:
        status = refuse([describe_unknown(repr(name), COMMANDS, "a command")], PROGRAM, argv)
    logging.shutdown()
    os._exit(status)


def find_command(name: str) -> Command:
    """Import the command of this name."""
    command: Command = importlib.import_module(f"vllm_headroom_tools.{COMMANDS[name][0]}").COMMAND
    return command


def execute(command: Command, name: str, argv: Sequence[str]) -> int:
    """Run a command and show its report; return the exit status."""
    try:
        given = parser_of(command, name).read(argv)
        answer = command.run(given)
        if isinstance(answer, Coroutine):
            answer = _awaited(answer)
    except Printed as printed:
        say(str(printed))
        return 0
    except (BadOptions, BadInput) as error:
        lines = error.lines if isinstance(error, BadOptions) else (str(error),)
        return refuse(lines, f"{PROGRAM} {name}", argv if command.has_report else ())
    if isinstance(answer, int):
        return answer
    if given.json:
        _say_envelope(answer, name)
        return answer.status
    for line in answer.lines:  # one by one: what comes last, as a picture, may take long
        style = (
            HEADLINES[answer.verdict] if line.strip() and line.strip() in answer.headline else ""
        )
        say(render_line(line.translate(CONTROLS), sys.stdout, style))
    return answer.status


def refuse(mistakes: Sequence[str], who: str, argv: Sequence[str]) -> int:
    """Show the mistakes that keep a command from running, as an envelope too where --json was given."""
    for line in mistakes:
        tell(f"{who}: {line}")
    findings = [Finding("input", Conclusion.CANNOT_TELL, each) for each in mistakes]
    report = Report(verdict=Conclusion.CANNOT_TELL, headline=mistakes[0], findings=findings)
    if "--json" in argv:
        _say_envelope(report, who.rpartition(" ")[2])
    return report.status


def _say_envelope(report: Report, name: str) -> None:
    say(json.dumps(report.build_envelope(name), indent=2, allow_nan=False))


def parser_of(command: Command, name: str) -> Parser:
    """Return the parser of a command's options; the help of the daemon lists all commands."""
    parser = Parser(f"{PROGRAM} {name}", _version)
    parser.usage, parser.description, parser.epilog = (
        command.usage,
        command.description,
        command.epilog,
    )
    if name == next(iter(COMMANDS)):
        lines = (f"  {each:<11}{summary}" for each, (_, summary) in COMMANDS.items())
        parser.description = "\n".join(
            (command.description, "Commands; each says more with --help:", *lines)
        )
    if command.has_report:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object instead of text"
        )
    command.options(parser)
    return parser


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415 - only --version asks, and it takes 20 ms

    return f"{PROGRAM} {metadata.version(PROGRAM)}"


def _awaited(answer: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever the command answers
    """Return what a coroutine comes to on uvloop, which is left open."""
    import asyncio  # noqa: PLC0415 - commands that wait for nothing need no loop

    import uvloop  # noqa: PLC0415 - the same

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(answer)


def save(
    file: Path | None, content: str, option: str = "", inputs: Iterable[str | Path | None] = ()
) -> None:
    """Write a file, where one is wanted; raises BadInput, also where it is one of the inputs."""
    try:
        if file is not None:
            read = [Path(each) for each in inputs if each is not None]
            if file.exists() and any(each.exists() and file.samefile(each) for each in read):
                raise BadInput(
                    f"{option}{file}: is what was read, and would be lost: name another file"
                )
            file.write_bytes(
                content.encode(errors="replace")
            )  # JSON, too, may name what UTF-8 cannot
    except OSError as error:
        raise BadInput(f"{option}{file}: cannot be written: {error.strerror}") from error


def say(text: str) -> None:
    """Write to standard output; whoever stops reading it needs no more of it."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            tell(f"{PROGRAM}: the answer cannot be written: {error.strerror}")
            raise SystemExit(
                2
            ) from None  # not 1, with which `check` and others report a bad result


def tell(line: str) -> None:
    """Write to standard error a line that is no result; where it cannot be written, the exit status says enough."""
    with suppress(OSError):
        sys.stderr.write(f"{render_line(line.translate(CONTROLS), sys.stderr)}\n")
        sys.stderr.flush()
