"""The table of docs/cards.md is what the daemon's own readers report about each kind of card."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.assets.cards import KINDS, read, table
from tests.assets.console import ROOT
from tests.assets.test_docs_tables import between
from tests.conftest import Golden
from tests.fakes.nobody import open_folder
from tests.fakes.nvml.reader import in_process

PAGE = ROOT / "docs" / "cards.md"


def test_the_table_of_cards_is_that_of_the_readers(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = {}
    with in_process(tmp_path, monkeypatch) as nvml:
        for kind in KINDS:
            with open_folder() as folder:
                readings[kind.name] = read(kind, folder, nvml)

    assert all(reading.failure is None for reading in readings.values())
    golden(PAGE, between(PAGE.read_text(encoding="utf-8"), "cards", table(readings)))
