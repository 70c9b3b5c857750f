"""The command `completion`: what a shell needs to complete commands, options and values."""

from argparse import Action, Namespace
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
from vllm_headroom_tools.options import BadOptions, Parser, choice


def list_options(name: str) -> list[tuple[Action, str, list[str]]]:
    """Return the options of a command and its words, with their help, and their values where they are a closed set."""
    parser = build_parser(find_command(name), name)
    return [(each, parser.explain(each), parser.list_values(each)) for each in parser._actions]  # noqa: SLF001


def write_bash() -> Iterator[str]:
    """Yield a script for bash: options, and the values of those that have a closed set."""
    yield "_vllm_headroom() {"
    yield '  local words command="${COMP_WORDS[1]}" last="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  case "$command" in -*) command=run ;; *) [ "$COMP_CWORD" -eq 1 ] && command="" ;; esac'
    yield '  case "$command $last" in'
    options = {name: list_options(name) for name in COMMANDS}
    for name, described in options.items():
        for action, _, values in described:
            patterns = "|".join(f'"{name} {flag}"' for flag in action.option_strings or [name])
            if values:
                yield f'    {patterns}) words="{" ".join(values)}" ;;'
    for name, described in options.items():
        flags = " ".join(flag for action, *_ in described for flag in action.option_strings)
        yield f'    "{name} "*) words="{flags}" ;;'
    yield f'    *) words="{" ".join(COMMANDS)}" ;;'
    yield from (
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
    )
    yield f"complete -o default -F _vllm_headroom {PROGRAM}"


def write_fish() -> Iterator[str]:
    """Yield a script for fish."""
    for name, (_, summary) in COMMANDS.items():
        yield f"complete -c {PROGRAM} -n __fish_use_subcommand -a {name} -d {_quote(summary)}"
        for action, text, values in list_options(name):
            flags = " ".join(
                f"-l {flag[2:]}"
                if flag.startswith("--")
                else f"-{'s' if len(flag) == len('-q') else 'o'} {flag[1:]}"
                for flag in action.option_strings
            )
            among = (
                f" -xa {_quote(' '.join(values))}" if values else "" if action.nargs == 0 else " -r"
            )
            if flags or values:
                when = f"-n '__fish_seen_subcommand_from {name}'"
                yield f"complete -c {PROGRAM} {when} {flags}{among} -d {_quote(text)}"


def _quote(text: str) -> str:
    return "'{}'".format(" ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'"))


SHELLS: Final = {
    "bash": write_bash,
    "zsh": lambda: ("autoload -U +X bashcompinit && bashcompinit", *write_bash()),
    "fish": write_fish,
}
SHELL: Final = choice(list(SHELLS))


def _options(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", type=SHELL, help="bash, zsh or fish")


def _run(given: Namespace) -> int:
    if given.shell is None:
        raise BadOptions(f"needs a SHELL, accepts {SHELL.accepts}")
    write_result("\n".join(SHELLS[given.shell]()))
    return 0


COMMAND: Final = Command(
    usage="%(prog)s SHELL",
    description="Prints a script that completes commands, options and values in a shell.\n",
    epilog="""\
Example:
  source <(vllm-headroom completion bash)   # in ~/.bashrc; ~/.zshrc has zsh
  vllm-headroom completion fish | source    # in ~/.config/fish/config.fish
""",
    options=_options,
    run=_run,
    has_report=False,
)
