"""What a command is, and the one way in which all of them are run."""

from __future__ import annotations

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
from typing import Any, Final, Generic, NoReturn, TypeVar

from msgspec import Struct

from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.early import no_collection
from vllm_headroom_tools.options import BadOptions, Parser, Printed
from vllm_headroom_tools.terminal import render_line
from vllm_headroom_tools.trace import BadInput

Result = TypeVar("Result")

PROGRAM: Final = "vllm-headroom"
BAD_INPUT: Final = 2


class Command(Struct, Generic[Result], frozen=True, kw_only=True):
    """A command: its options, what it does with them, and how its answer is shown.

    `run` raises BadInput or BadOptions where it has no answer. `text` gives lines; without it nothing is said, without
    `document` there is no --json.
    """

    usage: str
    description: str
    epilog: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace], Result | Coroutine[Any, Any, Result]]
    status: Callable[[Result], int]
    text: Callable[[Result], Iterable[str]] | None = None
    document: Callable[[Result], Mapping[str, Any]] | None = None


def start(table: Mapping[str, tuple[str, str]], name: str, argv: Sequence[str]) -> NoReturn:
    """Run the command of this name in the table and end the process; an error of ours is raised.

    The process ends without waiting for threads: one may wait for a resolver that does not answer (10 s, measured), and
    SIGTERM may not.
    """
    if name in table and argv[:1] == ["--version"]:  # a first word is no option's value, and needs no imports
        say(_version())
        status = 0
    elif name in table:
        with no_collection():
            command = importlib.import_module(f"vllm_headroom_tools.{table[name][0]}").COMMAND
        status = execute(command, name, argv, table)
    else:
        status = BAD_INPUT
        import difflib  # noqa: PLC0415 - only a mistake asks for it

        closest = difflib.get_close_matches(name, table, n=1)
        meant = f"did you mean {closest[0]}?" if closest else f"accepts {', '.join(table)}"
        tell(f"{PROGRAM}: {name!r}: not a command, {meant}")
    logging.shutdown()
    os._exit(status)


def execute(
    command: Command[Any],
    name: str,
    argv: Sequence[str],
    table: Mapping[str, tuple[str, str]] = {},
) -> int:
    """Run a command and show its answer; return the exit status."""
    try:
        given = parser_of(command, name, table).read(argv)
        answer = command.run(given)
        if isinstance(answer, Coroutine):
            answer = _awaited(answer)
    except Printed as printed:
        say(str(printed))
        return 0
    except (BadOptions, BadInput) as error:
        for line in error.lines if isinstance(error, BadOptions) else (str(error),):
            tell(f"{PROGRAM} {name}: {line}")
        return BAD_INPUT
    if command.document is not None and given.json:
        say(json.dumps(command.document(answer), indent=2, allow_nan=False))
    elif command.text is not None:
        for line in command.text(answer):  # one by one: what comes last, as a picture, may take long
            say(render_line(line.translate(CONTROLS), sys.stdout))
    return command.status(answer)


def parser_of(command: Command[Any], name: str, table: Mapping[str, tuple[str, str]] = {}) -> Parser:
    """Return the parser of a command's options; the help of the table's first command lists them all."""
    parser = Parser(f"{PROGRAM} {name}", _version)
    parser.usage, parser.description, parser.epilog = command.usage, command.description, command.epilog
    if table and name == next(iter(table)):
        lines = (f"  {each:<11}{summary}" for each, (_, summary) in table.items())
        parser.description = "\n".join((command.description, "Commands; each says more with --help:", *lines))
    if command.document is not None:
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
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


def save(file: Path | None, content: str, option: str = "") -> None:
    """Write a file, where one is wanted; raises BadInput, which names it behind its option."""
    try:
        if file is not None:
            file.write_bytes(content.encode(errors="replace"))  # JSON, too, may name what UTF-8 cannot
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
            raise SystemExit(BAD_INPUT) from None  # not 1, with which `check` and others report a bad result


def tell(line: str) -> None:
    """Write to standard error a line that is no result; where it cannot be written, the exit status says enough."""
    with suppress(OSError):
        sys.stderr.write(f"{render_line(line.translate(CONTROLS), sys.stderr)}\n")
        sys.stderr.flush()
