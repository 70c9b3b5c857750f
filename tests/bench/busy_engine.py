"""Pages of a busy engine: the recorded one with numbers that move from one page to the next."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from tests.contract.data_parallel import data_parallel_page
from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, with_head

ONE_ENGINE: Final = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
EIGHT_ENGINES: Final = data_parallel_page(8)

_MOVES: Final[dict[str, Callable[[int], float]]] = {
    "num_requests_running": lambda step: step % 16 + 1,
    "num_requests_waiting": lambda step: step % 7,
    "kv_cache_usage_perc": lambda step: (step % 97 + 1) / 100,
    "prompt_tokens_total": lambda step: 500 * step,
    "generation_tokens_total": lambda step: 900 * step,
    "request_success_total": lambda step: step,
    "prefix_cache_queries_total": lambda step: 500 * step,
    "prefix_cache_hits_total": lambda step: 200 * step,
}
"""What changes between two scrapes of a busy server, of what the daemon reads: 12 of 18 lines."""

_LINE: Final = re.compile(rf"^(vllm:({'|'.join(_MOVES)})\{{.*\}}) \S+$", re.MULTILINE)


def pages(recorded: str) -> Callable[[int], str]:
    """Return a function that gives the page of a step."""
    first_text, *pieces = _LINE.split(recorded)
    moving = [
        (head, _MOVES[name], tail) for head, name, tail in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
    ]

    def page(step: int) -> str:
        return first_text + "".join(f"{head} {float(move(step))}{tail}" for head, move, tail in moving)

    return page


def busy(recorded: str) -> Answer:
    """Answer every request with the next page, uncompressed, as vLLM does where the client accepts nothing else."""
    page, steps = pages(recorded), count(1)

    def answer(connection: socket.socket, _closing: threading.Event) -> None:
        connection.sendall(with_head(page(next(steps)).encode()))

    return answer
