"""All days by name."""

from __future__ import annotations

from typing import Final

from tests.card.corpus.benign import BENIGN
from tests.card.corpus.day import Day
from tests.card.corpus.leaking import LEAKING

DAYS: Final[dict[str, Day]] = {f"ok-{name}": day for name, day in BENIGN.items()} | {
    f"leak-{name}": day for name, day in LEAKING.items()
}
