"""The command `help`.

It prints a command's help as text or as a man page.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from vllm_headroom_tools.cli import (
    COMMANDS,
    PROGRAM,
    Command,
    build_parser,
    find_command,
    write_result,
)
from vllm_headroom_tools.early import DEFAULT_COMMAND
from vllm_headroom_tools.options import Parser, choice


def render_man(name: str) -> Iterator[str]:
    """Yield the lines of a command's man page in roff."""
    parser = build_parser(find_command(name), name)
    _, summary = COMMANDS[name]
    yield f'.TH "{PROGRAM}-{name}" 1 "" "{PROGRAM}"'
    yield ".SH NAME"
    yield _escape(f"{PROGRAM}-{name} - {summary}")
    yield ".SH SYNOPSIS"
    yield from _render_verbatim(parser.format_usage().removeprefix("usage: ").strip())
    yield ".SH DESCRIPTION"
    yield from _render_verbatim(parser.description or "")
    yield ".SH OPTIONS"
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        flags = ", ".join(action.option_strings)
        # In argparse, an option without a value (a flag) has nargs 0.
        value = "" if action.nargs == 0 else f" {action.metavar}"
        yield ".TP"
        yield f".B {_escape(f'{flags}{value}'.strip())}"
        yield _escape(parser.explain(action))
    yield ".SH EXIT STATUS AND EXAMPLES"
    yield from _render_verbatim(parser.epilog or "")


def _render_verbatim(text: str) -> Iterator[str]:
    """Yield the text as lines that roff does not fill."""
    yield ".nf"
    yield _escape(text)
    yield ".fi"


def _escape(text: str) -> str:
    """Escape backslashes, hyphens and leading control characters for roff."""
    lines = text.rstrip().replace("\\", "\\e").replace("-", "\\-").splitlines()
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "name", metavar="COMMAND", nargs="?", type=choice(list(COMMANDS)), help="without it, run"
    )
    parser.add_argument("--man", action="store_true", help="print a man page")


def _run(arguments: Namespace) -> int:
    """Print a command's help or man page; return 0."""
    name = arguments.name or DEFAULT_COMMAND
    if arguments.man:
        text = "\n".join(render_man(name))
    else:
        text = build_parser(find_command(name), name).format_help().rstrip()
    write_result(text)
    return 0


COMMAND: Final = Command(
    usage="%(prog)s [--man] [COMMAND]",
    description="Shows the options of a command, as its --help does, or its man page.\n",
    epilog="""\
Example:
  vllm-headroom help plan
  vllm-headroom help --man plan | man -l -
""",
    options=_add_options,
    run=_run,
    has_report=False,
)
