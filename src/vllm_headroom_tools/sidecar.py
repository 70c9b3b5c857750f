"""A sidecar's `/snapshot.json`: the newest sample with its verdicts, and one day of curves."""

from typing import Any, Final

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.engine_choice import choose_engine, name_labels
from vllm_headroom_tools.openai import parse_object
from vllm_headroom_tools.terminal import NO_SIDECAR

FETCH_TIMEOUT_SECONDS: Final = 5.0

MOST_DOCUMENT_BYTES: Final = 64 * 2**20
"""The maximum size of a document. A document for 64 engines on eight GPUs takes 40 MB. It contains
a day of curves for each engine.
"""

NO_DOCUMENT: Final = f"what answers is not vllm-headroom: {NO_SIDECAR}"
REQUIRED_KEYS: Final = frozenset({"headroom_snapshot", "verdicts", "gpus", "history"})

Document = dict[str, Any]
"""The parsed content of /snapshot.json."""


async def fetch_document(reader: PageReader, engine_name: str | None = None) -> Document | str:
    """Fetch the document, or return one line that says why it cannot be fetched.

    `engine_name` selects one of several engines. `engine_name` may be None if the sidecar watches
    only one engine.
    """
    page = await reader.fetch()
    if isinstance(page, Failure):
        return f"{strip_advice(page)}: {NO_SIDECAR}"
    document = parse_object(page)
    if "headroom_node" in document:
        try:
            document = choose_document(document, engine_name)
        except BadInput as error:
            return str(error)
    return document if document.keys() >= REQUIRED_KEYS else NO_DOCUMENT


def choose_document(node: Document, engine_name: str | None) -> Document:
    """Select one engine's document; raise BadInput if the selection is not possible."""
    engines = node.get("engines")
    if not isinstance(engines, list):
        return {}
    documents: dict[str, Document] = {}
    for engine in engines:
        if isinstance(engine, dict) and isinstance(engine.get("snapshot"), dict):
            documents[name_labels(engine)] = engine["snapshot"]
    return documents[choose_engine(documents, engine_name)]
