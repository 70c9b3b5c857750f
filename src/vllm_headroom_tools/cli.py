"""The definition of a command, and the code that runs any command."""

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
from typing import Any, Final, NoReturn, TypeVar

from msgspec import Struct

from vllm_headroom.inputs import describe_unknown
from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.early import DEFAULT_COMMAND, pause_collection
from vllm_headroom_tools.options import BadOptions, Parser, Printed
from vllm_headroom_tools.terminal import render_line

T = TypeVar("T")

PROGRAM: Final = "vllm-headroom"

HEADLINE_STYLES: Final = {
    Conclusion.GOOD: "bold green",
    Conclusion.NOT_GOOD: "bold red",
    Conclusion.CANNOT_TELL: "bold yellow",
}
"""The rich style of a report's headline on a terminal, keyed by the report's verdict."""

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run", "Runs the daemon beside a vLLM server; the default."),
    "demo": ("demo.command", "Runs the daemon over a simulated engine and GPU."),
    "doctor": (
        "doctor.command",
        "Shows what the daemon can see from here, and how to fix the rest.",
    ),
    "probe": ("probe.command", "Installs the probe into vLLM; records who allocates."),
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
"""Each command's module, and a one-line description of the command.

A command's module is imported only when the command is called. Most of these imports are slow.
"""


class Command(Struct, frozen=True, kw_only=True):
    """A command: its help texts, its options, and the function that runs it."""

    usage: str
    description: str

    epilog: str
    """The text that --help shows below the options: an example and the exit statuses."""

    options: Callable[[Parser], None]
    """Adds the command's own options to a parser."""

    run: Callable[[Namespace], Report | int | Coroutine[Any, Any, Report | int]]
    """Returns the report, or the exit status if there is no report. Raises BadInput or BadOptions.
    """

    has_report: bool = True
    """Whether --json prints the report."""


def start(name: str, argv: Sequence[str]) -> NoReturn:
    """Run the named command, and exit the process with the command's exit status.

    This function raises an exception only if the program has a bug. The process exits without
    waiting for its threads. A thread that hangs must not delay SIGTERM. For example, an
    unresponsive DNS resolver blocked a thread for 10 s.
    """
    status = _find_and_execute(name, argv)
    logging.shutdown()
    os._exit(status)


def _find_and_execute(name: str, argv: Sequence[str]) -> int:
    """Run a command or print the version, and return the exit status.

    The status is 2 for an unknown command.
    """
    if name not in COMMANDS:
        return refuse([describe_unknown(repr(name), COMMANDS, "a command")], PROGRAM, argv)
    # The first word cannot be the value of an option. Therefore, no parser needs to be imported.
    if argv[:1] == ["--version"]:
        write_result(_read_version())
        return 0
    with pause_collection():
        command = find_command(name)
    return execute(command, name, argv)


def find_command(name: str) -> Command:
    """Import and return the named command; raise KeyError if there is no such command."""
    module_name, _ = COMMANDS[name]
    command: Command = importlib.import_module(f"vllm_headroom_tools.{module_name}").COMMAND
    return command


def execute(command: Command, name: str, argv: Sequence[str]) -> int:
    """Run a command, print its report if it has one, and return the status.

    Errors in the options or the input are printed too and result in status 2.
    """
    try:
        arguments = build_parser(command, name).read(argv)
        answer = command.run(arguments)
        if isinstance(answer, Coroutine):
            answer = _await(answer)
    except Printed as printed:
        write_result(str(printed))
        return 0
    # Both exceptions are operator errors: each gets one line and no traceback.
    except (BadOptions, BadInput) as error:
        mistakes = error.lines if isinstance(error, BadOptions) else (str(error),)
        return refuse(mistakes, f"{PROGRAM} {name}", argv if command.has_report else ())
    # A command without a report, such as the daemon, returns its exit status.
    if isinstance(answer, int):
        return answer
    if arguments.json:
        _write_envelope(answer, name)
    else:
        _write_lines(answer)
    return answer.status


def _write_lines(report: Report) -> None:
    """Write a report line by line.

    The last lines may take a long time to compute. The colour of the headline depends on the
    verdict.
    """
    for line in report.lines:
        style = ""
        if line.strip() and line.strip() in report.headline:
            style = HEADLINE_STYLES[report.verdict]
        write_result(render_line(line.translate(CONTROLS), sys.stdout, style))


def refuse(mistakes: Sequence[str], program: str, argv: Sequence[str]) -> int:
    """Write to standard error the mistakes that prevent a command from running; return 2.

    With --json in `argv`, a report's JSON object is also written to standard output.
    """
    for mistake in mistakes:
        write_note(f"{program}: {mistake}")
    findings = [Finding("input", Conclusion.CANNOT_TELL, mistake) for mistake in mistakes]
    report = Report(verdict=Conclusion.CANNOT_TELL, headline=mistakes[0], findings=findings)
    if "--json" in argv:
        _, _, command_name = program.rpartition(" ")
        _write_envelope(report, command_name)
    return report.status


def _write_envelope(report: Report, name: str) -> None:
    write_result(json.dumps(report.build_envelope(name), indent=2, allow_nan=False))


def build_parser(command: Command, name: str) -> Parser:
    """Build the parser of a command's options; the daemon's help also lists all commands."""
    parser = Parser(f"{PROGRAM} {name}", _read_version)
    parser.usage = command.usage
    parser.description = command.description
    parser.epilog = command.epilog
    if name == DEFAULT_COMMAND:
        lines = [
            command.description,
            "Commands; each says more with --help:",
            *(f"  {command_name:<11}{summary}" for command_name, (_, summary) in COMMANDS.items()),
        ]
        parser.description = "\n".join(lines)
    if command.has_report:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object instead of text"
        )
    command.options(parser)
    return parser


def _read_version() -> str:
    from importlib import metadata  # noqa: PLC0415 - only --version needs it, and it takes 20 ms

    return f"{PROGRAM} {metadata.version(PROGRAM)}"


def _await(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop and return its result.

    The loop is not closed, because closing it would wait for its threads. The process is about to
    exit anyway.
    """
    import asyncio  # noqa: PLC0415 - only asynchronous commands need a loop

    import uvloop  # noqa: PLC0415 - the same

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(coroutine)


def save(
    file: Path | None, content: str, option: str = "", inputs: Iterable[str | Path | None] = ()
) -> None:
    """Write a file; do nothing if `file` is None.

    Raises BadInput in the same cases as save_lines().
    """
    if file is not None:
        save_lines(file, (content,), option, inputs)


def save_lines(
    file: Path, lines: Iterable[str], option: str = "", inputs: Iterable[str | Path | None] = ()
) -> None:
    """Write a file line by line, because it may be larger than memory.

    Raises BadInput if the file cannot be written. Also raises BadInput if the file is one of the
    inputs. Inputs must not be overwritten. In the message, `option` precedes the file's name.
    """
    try:
        if _is_one_of(file, inputs):
            raise BadInput(
                f"{option}{file}: is what was read, and would be lost: name another file"
            )
        # A JSON escape may be half of a surrogate pair, which UTF-8 cannot encode.
        with file.open("wb") as stream:
            stream.writelines(line.encode(errors="replace") for line in lines)
    except OSError as error:
        raise BadInput(f"{option}{file}: cannot be written: {error.strerror}") from error


def _is_one_of(file: Path, inputs: Iterable[str | Path | None]) -> bool:
    """Return whether a file is one of the inputs.

    A link may give it another name.
    """
    if not file.exists():
        return False
    paths = [Path(name) for name in inputs if name is not None]
    return any(path.exists() and file.samefile(path) for path in paths)


def write_result(text: str) -> None:
    """Write a text and a newline to standard output.

    If a pipe's reader such as `head` has exited, nothing more is written. Raises SystemExit with
    status 2 for any other error.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        # Python flushes the stream again when the process exits. That flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            write_note(f"{PROGRAM}: the answer cannot be written: {error.strerror}")
            # The status is not 1. `check` and other commands use 1 for a bad result.
            raise SystemExit(2) from None


def write_note(line: str) -> None:
    """Write a line that is not part of the result to standard error.

    A line that cannot be written is dropped, because the exit status is enough.
    """
    with suppress(OSError):
        sys.stderr.write(f"{render_line(line.translate(CONTROLS), sys.stderr)}\n")
        sys.stderr.flush()
