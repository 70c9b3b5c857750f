"""The entry of the process."""

import sys

from vllm_headroom_tools.early import count_files, end_on_signals, stand_in


def main() -> None:
    """Run the command that the process was started with, the daemon without one."""
    is_named = len(sys.argv) > 1 and not sys.argv[1].startswith("-") and "://" not in sys.argv[1]
    name = sys.argv[1] if is_named else "run"
    stand_in()
    count_files()
    end_on_signals(0 if name in {"run", "demo"} else None)  # before imports: they take time too
    from vllm_headroom_tools.cli import start  # noqa: PLC0415 - see above

    start(name, sys.argv[1 + is_named :])


if __name__ == "__main__":
    main()
