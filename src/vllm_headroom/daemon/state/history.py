"""The curves of the day before, over restarts of the daemon."""

from __future__ import annotations

from typing import Final

from vllm_headroom.daemon.state.file import File
from vllm_headroom.expose.history import FORMAT, KeptHistory

HISTORY: Final = File("history.json", KeptHistory, FORMAT)
"""Apart from the rest: it is of whatever engine was there, and only shown."""
