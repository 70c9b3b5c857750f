"""Lead the links that leave docs/ to the repository: its other pages are not on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent
DOCS: Final = ROOT / "docs"
LINK: Final = re.compile(r"\]\((\.\.[^)#\s]*)(#[^)\s]+)?\)")


def on_page_markdown(
    markdown: str,
    *,
    page: Any,  # noqa: ANN401 - mkdocs' own type
    config: Any,  # noqa: ANN401 - the same
    files: object,
) -> str:
    """Return a page's text with these links, as mkdocs calls it."""
    del files
    return lead_out(markdown, (DOCS / page.file.src_uri).parent, config["repo_url"])


def lead_out(text: str, folder: Path, repository: str) -> str:
    """Return a page of docs/ with its links out of docs/ pointed at the repository."""

    def lead(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({repository}/{kind}/main/{target.relative_to(ROOT)}{found[2] or ''})"

    return LINK.sub(lead, text)
