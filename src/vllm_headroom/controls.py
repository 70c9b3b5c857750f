"""Control characters, as text may be shown to a person."""

from __future__ import annotations

from typing import Final

CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""What an engine's text could do to a terminal or to the next line."""
