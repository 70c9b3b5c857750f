"""The commands: the module of each, and what it does, in a line."""

from __future__ import annotations

import sys

from vllm_headroom_tools.early import count_files, end_on_signals, stand_in

COMMANDS = {
    "run": ("run", "The daemon, beside a vLLM server; what runs without a command."),
    "demo": ("demo.command", "The daemon over a simulated engine and GPU, to look at."),
    "doctor": ("doctor.command", "What the daemon can see from here, and what to do about the rest."),
    "probe": ("probe", "Puts the probe into vLLM; asks it who allocates."),
    "plan": ("plan.command", "Whether a model will fit, and what to change."),
    "preflight": ("preflight.command", "Whether vLLM would start on these GPUs now."),
    "smoke": ("smoke.command", "Whether a vLLM that was just started serves."),
    "load": ("load.command", "A bounded load on a server you name, with its memory watched."),
    "check": ("check.command", "Whether a trace keeps its limits: the gate for CI."),
    "advise": ("advise.command", "Which cause fits, and which option of vLLM mends it."),
    "watch": ("watch.command", "What a sidecar says and sees, live in the terminal."),
    "postmortem": ("postmortem.command", "What happened before the engine ended, and why."),
    "replay": ("replay.command", "The leak detector over a recorded past."),
}
"""Modules of `vllm_headroom_tools`; nothing of a command is imported before it is called."""


def main() -> None:
    """Run the command that the process was started with, the daemon without one."""
    is_named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    name = sys.argv[1] if is_named else "run"
    stand_in()
    count_files()
    end_on_signals(0 if name in {"run", "demo"} else None)  # before imports: they take time too
    from vllm_headroom_tools.cli import start  # noqa: PLC0415 - see above

    start(COMMANDS, name, sys.argv[1 + is_named :])


if __name__ == "__main__":
    main()
