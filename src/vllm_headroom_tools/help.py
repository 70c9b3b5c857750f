"""The command `help`: a command's options, as text or as a man page."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from vllm_headroom_tools.cli import COMMANDS, PROGRAM, Command, find_command, parser_of, say
from vllm_headroom_tools.options import Parser, choice


def render_man(name: str) -> Iterator[str]:
    """Yield the man page of a command, in roff."""
    parser = parser_of(find_command(name), name)
    yield f'.TH "{PROGRAM}-{name}" 1 "" "{PROGRAM}"'
    yield from (".SH NAME", _escape(f"{PROGRAM}-{name} - {COMMANDS[name][1]}"))
    yield from (
        ".SH SYNOPSIS",
        ".nf",
        _escape(parser.format_usage().removeprefix("usage: ").strip()),
        ".fi",
    )
    yield from (".SH DESCRIPTION", ".nf", _escape(parser.description or ""), ".fi", ".SH OPTIONS")
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of what was added
        flags = ", ".join(action.option_strings)
        value = "" if action.nargs == 0 else f" {action.metavar}"
        yield from (
            ".TP",
            f".B {_escape(f'{flags}{value}'.strip())}",
            _escape(parser.explain(action)),
        )
    yield from (".SH EXIT STATUS AND EXAMPLES", ".nf", _escape(parser.epilog or ""), ".fi")


def _escape(text: str) -> str:
    """Return text that roff prints as it is."""
    lines = text.rstrip().replace("\\", "\\e").replace("-", "\\-").splitlines()
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def _options(parser: Parser) -> None:
    parser.add_argument(
        "name", metavar="COMMAND", nargs="?", type=choice(list(COMMANDS)), help="without it, run"
    )
    parser.add_argument("--man", action="store_true", help="print a man page")


def _run(given: Namespace) -> int:
    name = given.name or next(iter(COMMANDS))
    text = parser_of(find_command(name), name).format_help().rstrip()
    say("\n".join(render_man(name)) if given.man else text)
    return 0


COMMAND: Final = Command(
    usage="%(prog)s [--man] [COMMAND]",
    description="Shows the options of a command, as its --help does, or its man page.\n",
    epilog="""\
Example:
  vllm-headroom help plan
  vllm-headroom help --man plan | man -l -
""",
    options=_options,
    run=_run,
    has_report=False,
)
