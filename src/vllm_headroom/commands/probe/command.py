"""The command `probe`: puts the probe where vLLM finds it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.probe.install import install
from vllm_headroom.config.kinds import Value, choice
from vllm_headroom.config.options import BadOptions, Parser

DESCRIPTION: Final = """\
Puts the probe into a folder where any vLLM from 0.9 on finds it, its image
unchanged. It tells the sidecar what only vLLM's processes know of their memory,
by files in a folder that both can use. See docs/probe.md.
"""

EPILOG: Final = """\
It ends with status 0, and with 2 when the folder cannot be written.

Example:
  vllm-headroom probe install /opt/headroom-probe
"""

FOLDER: Final = Value(read=lambda text: Path(text) if text else _refused(), accepts="the path of a folder")


def _refused() -> Path:
    raise ValueError


def _options(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", nargs="?", type=choice(["install", "record"]), help="what to do")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=FOLDER, help="where the probe goes")


def _run(given: Namespace) -> dict[str, Any]:
    if given.action is None:
        raise BadOptions("needs what to do: install FOLDER")
    if given.folder is None:
        raise BadOptions(f"FOLDER: needed to install, accepts {FOLDER.accepts}")
    return {"folder": str(given.folder), "installed": list(install(given.folder))}


def _text(answer: dict[str, Any]) -> Iterator[str]:
    yield f"{answer['folder']} has {' and '.join(answer['installed'])}. vLLM loads the probe with"
    yield f"  PYTHONPATH={answer['folder']}"
    yield "  HEADROOM_PROBE_DIR=FOLDER  # in memory, writable by vLLM and by the sidecar, which has the same setting"


COMMAND: Final[Command[dict[str, Any]]] = Command(
    usage="%(prog)s [--json] install FOLDER",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=_options,
    run=_run,
    text=_text,
    document=lambda answer: answer,
    status=lambda _: 0,
)
