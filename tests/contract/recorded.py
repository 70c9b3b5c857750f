"""The recorded pages of real servers, each with what the client knew while it was taken."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines

FOLDER: Final = Path(__file__).parent / "captures"
HANDMADE: Final = Path(__file__).parent / "handmade"
OTHERS: Final = Path(__file__).parent / "engines"
"""Pages of engines other than vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One page; `name` is folder/page, `command` started the server, the counts are the client's around the scrape."""

    name: str
    command: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def is_v0(self) -> bool:
        return "-v0" in self.name

    def read(self) -> EnginePage:
        page = parse_engines((FOLDER / f"{self.name}.prom").read_text())
        assert isinstance(page, EnginePage)
        return page

    def option(self, name: str) -> str | None:
        match = re.search(rf"--{name} (\S+)", self.command)
        return match[1] if match else None


def _of_folder(folder: Path) -> list[Capture]:
    truth = json.loads((folder / "truth.json").read_text())
    return [
        Capture(
            name=f"{folder.name}/{name}",
            command=truth["servers"][entry["server"]]["command"],
            before=entry["client_before"],
            after=entry["client_after"],
        )
        for name, entry in truth["captures"].items()
    ]


CAPTURES: Final = {
    capture.name: capture for truth in sorted(FOLDER.glob("*/truth.json")) for capture in _of_folder(truth.parent)
}


def total(page: EnginePage, field: str) -> float | None:
    """Return the field summed over the engines; None when no engine shows it."""
    known_values = [value for engine in page.engines if (value := getattr(engine, field)) is not None]
    return sum(known_values) if known_values else None
