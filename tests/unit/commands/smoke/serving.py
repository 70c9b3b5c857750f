"""A server that answers as vLLM does, path by path, or as badly as instructed."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, EngineServer, page

RECORDED: Final = (
    (FOLDER / "vllm-0.32.0" / "idle.prom")
    .read_text()
    .replace('kv_cache_memory_bytes="1073741824"', 'kv_cache_memory_bytes="None"')
)
"""A vLLM that has served nothing yet, with a budget of 0.92 of its GPU."""

USAGE: Final = {"prompt_tokens": 1, "completion_tokens": 8}
COMPLETION: Final = json.dumps({"choices": [{"text": " world"}], "usage": USAGE})
CHAT: Final = json.dumps({"choices": [{"message": {"content": "Hello!"}}], "usage": USAGE})
MODELS: Final = json.dumps({"object": "list", "data": [{"id": "tiny"}, {"id": "an-adapter"}]})
MISSING: Final = page('{"detail":"Not Found"}', status="404 Not Found")


def metrics(finished: int) -> str:
    """Return the page of a vLLM that has finished so many requests."""
    return re.sub(r'(request_success_total\{.*finished_reason="length".*\}) 0\.0', rf"\1 {finished}.0", RECORDED)


def error(status: str, message: str) -> Answer:
    """Answer with an error in vLLM's words."""
    return page(json.dumps({"error": {"message": message, "type": "error", "code": int(status[:3])}}), status=status)


class Vllm(EngineServer):
    """Serves what `answers` has for each path; a completion counts, once it was answered.

    `bodies` are the requests' documents by path. Every path begins with `prefix`.
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None, *, port: int = 0) -> None:
        self.finished = 0
        self.prefix = ""
        self.bodies: list[tuple[str, Any]] = []
        self.answers: dict[str, Answer] = {
            "/health": page(""),
            "/v1/models": page(MODELS),
            "/v1/completions": page(COMPLETION),
            **(answers or {}),
        }
        super().__init__(self._by_path, port=port)

    def _by_path(self, connection: socket.socket, closing: threading.Event) -> None:
        head = self.requests[-1]  # the smoke test asks for one thing at a time
        path = head.split()[1].removeprefix(self.prefix)
        if self.body:
            self.bodies.append((path, json.loads(self.body)))
        if path == "/metrics" and path not in self.answers:
            page(metrics(self.finished))(connection, closing)
            return
        self.answers.get(path, MISSING)(connection, closing)
        self.finished += path.endswith("completions")
