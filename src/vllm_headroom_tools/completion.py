"""The command `completion`: what a shell needs to complete commands, options and values."""

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
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
from vllm_headroom_tools.options import BadOptions, Parser, choice


def _build_program_parser() -> ArgumentParser:
    """Build one parser of all commands, as shtab needs it.

    The program itself has the daemon's options, which may be given without a command.
    """
    program = ArgumentParser(
        prog=PROGRAM, parents=[_build_completable(DEFAULT_COMMAND)], add_help=False
    )
    commands = program.add_subparsers(dest="command")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, parents=[_build_completable(name)], add_help=False)
    return program


def _build_completable(name: str) -> Parser:
    """Build a command's parser in which each option has the values that shtab completes.

    An option from a closed set completes its values; any other option with a value completes files.
    """
    import shtab  # noqa: PLC0415 - only this command needs it

    parser = build_parser(find_command(name), name)
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        values = parser.list_values(action)
        if values:
            action.choices = values
        elif action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # where shtab looks for it
    return parser


def write_bash() -> str:
    """Return a script for bash."""
    import shtab  # noqa: PLC0415 - only this command needs it

    return shtab.complete(_build_program_parser(), "bash").rstrip()


def write_zsh() -> str:
    """Return a script for zsh.

    shtab's script registers the completion only if the shell evaluates the script. The returned
    script does that itself, so that a shell may source it.
    """
    import shtab  # noqa: PLC0415 - only this command needs it

    script = shtab.complete(_build_program_parser(), "zsh").rstrip()
    return f"eval \"$(cat <<'SHTAB'\n{script}\nSHTAB\n)\""


def write_fish() -> str:
    """Return a script for fish.

    The script is our own, because shtab's would read vLLM's option `-tp` as the two options `-t`
    and `-p`.
    """
    lines = []
    for name, (_, summary) in COMMANDS.items():
        lines.append(
            f"complete -c {PROGRAM} -n __fish_use_subcommand -a {name} -d {_quote(summary)}"
        )
        parser = build_parser(find_command(name), name)
        lines += _list_fish_options(name, parser)
    return "\n".join(lines)


def _list_fish_options(name: str, parser: Parser) -> Iterator[str]:
    """Yield a line of fish for each option, and each positional argument with a closed set."""
    condition = f"-n '__fish_seen_subcommand_from {name}'"
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        flags = " ".join(map(_write_fish_flag, action.option_strings))
        values = parser.list_values(action)
        if flags or values:
            arguments = _write_fish_values(action, values)
            description = _quote(parser.explain(action))
            yield f"complete -c {PROGRAM} {condition} {flags}{arguments} -d {description}"


def _write_fish_flag(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    # fish calls an option such as -q short, and one such as -tp old-style.
    kind = "s" if len(flag) == len("-q") else "o"
    return f"-{kind} {flag[1:]}"


def _write_fish_values(action: Action, values: list[str]) -> str:
    """Return how fish completes the value of an option: from its values, from files, or not."""
    if values:
        return f" -xa {_quote(' '.join(values))}"
    return "" if action.nargs == 0 else " -r"


def _quote(text: str) -> str:
    one_line = " ".join(text.split())
    escaped = one_line.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


WRITERS: Final[dict[str, Callable[[], str]]] = {
    "bash": write_bash,
    "zsh": write_zsh,
    "fish": write_fish,
}
SHELL: Final = choice(list(WRITERS))


def _add_options(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", type=SHELL, help="bash, zsh or fish")


def _run(arguments: Namespace) -> int:
    """Print the completion script; return 0.

    Raise BadOptions if no shell is named.
    """
    if arguments.shell is None:
        raise BadOptions(f"needs a SHELL, accepts {SHELL.accepts}")
    write_result(WRITERS[arguments.shell]())
    return 0


COMMAND: Final = Command(
    usage="%(prog)s SHELL",
    description="Prints a script that completes commands, options and values in a shell.\n",
    epilog="""\
Example:
  source <(vllm-headroom completion bash)   # in ~/.bashrc; ~/.zshrc has zsh
  vllm-headroom completion fish | source    # in ~/.config/fish/config.fish
""",
    options=_add_options,
    run=_run,
    has_report=False,
)
