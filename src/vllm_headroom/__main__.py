"""The commands: the module of each, and what it does, in a line."""

from __future__ import annotations

import sys

from vllm_headroom_tools.early import count_files, end_on_signals, stand_in

COMMANDS = {
    "run": ("run", "Runs the daemon beside a vLLM server; the default."),
    "demo": ("demo.command", "Runs the daemon over a simulated engine and GPU."),
    "doctor": ("doctor.command", "Shows what the daemon can see from here, and how to fix the rest."),
    "probe": ("probe", "Installs the probe into vLLM; records who allocates."),
    "plan": ("plan.command", "Computes whether a model will fit, and what to change if not."),
    "preflight": ("preflight.command", "Checks whether vLLM would start on these GPUs now."),
    "smoke": ("smoke.command", "Checks whether a vLLM that has just started serves."),
    "load": ("load.command", "Puts a bounded load on a server; watches its memory."),
    "check": ("check.command", "Checks whether a trace keeps its limits: a gate for CI."),
    "advise": ("advise.command", "Finds the cause that fits, and the vLLM option that fixes it."),
    "watch": ("watch.command", "Shows a sidecar's verdicts and figures, live in the terminal."),
    "postmortem": ("postmortem.command", "Explains what happened before the engine exited, and why."),
    "replay": ("replay.command", "Runs the leak detector over a recorded trace."),
}
"""Modules of `vllm_headroom_tools`; nothing of a command is imported before it is called."""


def main() -> None:
    """Run the command that the process was started with, the daemon without one."""
    is_named = len(sys.argv) > 1 and not sys.argv[1].startswith("-") and "://" not in sys.argv[1]
    name = sys.argv[1] if is_named else "run"
    stand_in()
    count_files()
    end_on_signals(0 if name in {"run", "demo"} else None)  # before imports: they take time too
    from vllm_headroom_tools.cli import start  # noqa: PLC0415 - see above

    start(COMMANDS, name, sys.argv[1 + is_named :])


if __name__ == "__main__":
    main()
