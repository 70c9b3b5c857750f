"""What a vLLM server answers when it is asked for its version."""

from __future__ import annotations

import json


def server_version(text: str) -> str | None:
    """Return the version in the answer to GET /version, {"version": "0.11.2"}; None where it is another one."""
    try:
        said = json.loads(text)["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return said if isinstance(said, str) else None
