"""The entry point of the process."""

import sys

from vllm_headroom_tools.early import (
    DEFAULT_COMMAND,
    exit_on_signals,
    open_closed_streams,
    require_open_files,
)


def main() -> None:
    """Run the command named on the command line, or the daemon if none is named."""
    name = DEFAULT_COMMAND
    arguments = sys.argv[1:]
    if arguments and _is_command_name(arguments[0]):
        name = arguments[0]
        arguments = arguments[1:]
    open_closed_streams()
    require_open_files()
    # The handlers are installed first, because a signal may arrive during the imports. Stopping the
    # daemon with a signal is no failure, so the status is 0.
    exit_on_signals(0 if name in {"run", "demo"} else None)
    from vllm_headroom_tools.cli import start  # noqa: PLC0415 - see above

    start(name, arguments)


def _is_command_name(word: str) -> bool:
    """Return whether `word` is a command's name, not an option or a URL."""
    return not word.startswith("-") and "://" not in word


if __name__ == "__main__":
    main()
