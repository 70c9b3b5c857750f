"""The command `load`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.load.options import DESCRIPTION, EXAMPLES, options, order
from vllm_headroom.commands.load.text import text


async def _run(given: Namespace) -> dict[str, Any]:
    from vllm_headroom.commands.load.compose import load  # noqa: PLC0415 - --help need not wait for the sampler
    from vllm_headroom.daemon import logs  # noqa: PLC0415 - the same

    logs.configure("logfmt", "error")  # the readers log what is told here in full
    return await load(order(given))


COMMAND: Final[Command[dict[str, Any]]] = Command(
    usage="%(prog)s --engine-url URL --concurrency NUMBER [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=text,
    document=lambda found: found,
    status=lambda found: Conclusion(found["verdict"]).status,
)
