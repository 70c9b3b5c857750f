"""The sidecar's document at /snapshot.json."""

from __future__ import annotations

from typing import Any, Final

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import CONTROLS, WORDS
from vllm_headroom_tools.openai import parse_object
from vllm_headroom_tools.terminal import NO_SIDECAR

NO_DOCUMENT: Final = f"what answers is not vllm-headroom: {NO_SIDECAR}"
KEYS: Final = frozenset({"headroom_snapshot", "verdicts", "gpus", "history"})

Document = dict[str, Any]


async def fetch_document(reader: PageReader) -> Document | str:
    """Return the document, or in one line why there is none."""
    page = await reader.fetch()
    if isinstance(page, Failure):
        return f"{strip_advice(page)}: {NO_SIDECAR}"
    document = parse_object(page)
    return document if document.keys() >= KEYS else NO_DOCUMENT


def describe_verdict(verdict: dict[str, Any]) -> str:
    """Return a verdict: its level as a word, which a colour only repeats."""
    return f"{WORDS.get(verdict['level'], verdict['level']):<11}{verdict['sentence']}".translate(CONTROLS)
