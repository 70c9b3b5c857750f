from __future__ import annotations

import pytest

from vllm_headroom.scrape.http import reader


@pytest.fixture(autouse=True)
def much_time_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine pauses, a thread takes longer than a token or a CA file may."""
    monkeypatch.setattr(reader, "_FILE_SECONDS", 30.0)
