"""What a sidecar says of itself at /snapshot.json."""

from __future__ import annotations

from typing import Any, Final

import httpx

from vllm_headroom.scrape.http.failures import without_secrets

TIMEOUT_SECONDS: Final = 5.0
MOST_BYTES: Final = 4 * 2**20
"""A day of 64 GPUs is a few of these; what is larger is no sidecar's."""

KEYS: Final = frozenset({"headroom_snapshot", "verdicts", "gpus", "history"})

Document = dict[str, Any]


async def ask(client: httpx.AsyncClient, url: httpx.URL) -> Document | str:
    """Return the document at a URL, or in one line why there is none."""
    shown = without_secrets(url)
    try:
        answer = await client.get(url)
        document = answer.json() if answer.is_success and len(answer.content) <= MOST_BYTES else None
    except httpx.HTTPError as error:
        return f"{shown} does not answer: {str(error) or type(error).__name__}"
    except ValueError:
        document = None
    if not answer.is_success:
        return f"{shown} answers {answer.status_code} {answer.reason_phrase}"
    if not isinstance(document, dict) or not document.keys() >= KEYS:
        return f"{shown} is not vllm-headroom's: give the sidecar's address, port 9839 unless it is set otherwise"
    return document
