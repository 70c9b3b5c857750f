"""Choose one of several engines by the name that --engine gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from vllm_headroom_tools.bad_input import BadInput

if TYPE_CHECKING:
    import httpx

ENGINE_METAVAR: Final = "NAME"
ENGINE_HELP: Final = "of several engines the one to take: NAMESPACE/POD, its unit or its URL"

MOST_SHOWN_NAMES: Final = 20
"""Our choice: the largest number of names that a message lists."""


def choose_engine(names: Collection[str], wanted: str | None) -> str:
    """Return the engine with the wanted name or, without a name, the only engine.

    `names` are full names: NAMESPACE/POD/CONTAINER, a unit or a URL. The wanted name may omit the
    container. Raises BadInput with a list of names if no engine or several engines match.
    """
    # A name without a container is sufficient if only one engine matches.
    matches = [
        name for name in names if wanted is None or name == wanted or name.startswith(f"{wanted}/")
    ]
    if len(matches) == 1:
        return matches[0]
    if not names:
        raise BadInput("no engine is watched here")
    # If some names match, only these are shown.
    shown_names = sorted(matches or names)
    listed = ", ".join(shown_names[:MOST_SHOWN_NAMES])
    if len(shown_names) > MOST_SHOWN_NAMES:
        listed += f" and {len(shown_names) - MOST_SHOWN_NAMES} more"
    if wanted is None or matches:
        raise BadInput(f"several engines are watched: choose one with --engine: {listed}")
    raise BadInput(f"no engine {wanted!r} is watched; there are: {listed}")


def name_labels(labels: Mapping[str, Any]) -> str:
    """Return an engine's full name, given the labels of its series or document."""
    if labels.get("pod"):
        parts = (labels.get("namespace"), labels["pod"], labels.get("container"))
        return "/".join(str(part) for part in parts if part)
    return str(labels.get("unit") or labels.get("engine_url") or "")


def add_engine(url: httpx.URL, name: str | None) -> httpx.URL:
    """Return the URL of a sidecar's page for one engine.

    If `name` is None, `url` itself is returned.
    """
    if name is None:
        return url
    return url.copy_with(query=urlencode({"engine": name}).encode())
