"""Bring alerts/, deploy/ and dashboards/ onto the site, and lead other links to the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent
DOCS: Final = ROOT / "docs"
GUEST_FOLDERS: Final = ("alerts", "deploy", "dashboards")
"""The folders beside docs/ whose pages are on the site too, so that its search finds them."""

GUESTS: Final = "repository"
"""Where these pages are on the site: docs/ has an alerts.md, so alerts/ needs another place."""

RUNBOOKS: Final = "alerts/runbooks"
LINK: Final = re.compile(r"\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]+)?\)")
"""A link to a file, with its anchor."""


def list_guests() -> list[str]:
    """Return the paths of the pages outside docs/ that are on the site, in the repository."""
    paths: list[str] = []
    for folder in GUEST_FOLDERS:
        paths += (str(page.relative_to(ROOT)) for page in sorted((ROOT / folder).rglob("*.md")))
    return paths


def on_config(
    config: Any,  # noqa: ANN401 - mkdocs' own type
) -> object:
    """Add the guests to the navigation, as mkdocs calls it."""
    guests = list_guests()
    runbooks = [f"{GUESTS}/{path}" for path in guests if path.startswith(RUNBOOKS)]
    others = [f"{GUESTS}/{path}" for path in guests if not path.startswith(RUNBOOKS)]
    config["nav"] += [{"Runbooks": runbooks}, {"Set up": others}]
    return config


def on_files(
    files: Any,  # noqa: ANN401 - mkdocs' own type
    *,
    config: Any,  # noqa: ANN401 - the same
) -> object:
    """Add the guests to the site's files, as mkdocs calls it."""
    # The tests have no mkdocs.
    from mkdocs.structure.files import File  # type: ignore[import-not-found]  # noqa: PLC0415

    for path in list_guests():
        files.append(File.generated(config, f"{GUESTS}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(
    markdown: str,
    *,
    page: Any,  # noqa: ANN401 - mkdocs' own type
    config: Any,  # noqa: ANN401 - the same
    files: object,
) -> str:
    """Return a page's text with its links led to the site or to the repository."""
    del files
    uri = page.file.src_uri
    source = DOCS / uri
    if uri.startswith(f"{GUESTS}/"):
        source = ROOT / uri.removeprefix(f"{GUESTS}/")
    return lead_out(markdown, source.parent, config["repo_url"])


def lead_out(text: str, folder: Path, repository: str) -> str:
    """Return the text of a page in a folder with links that work on the site.

    A link to a page of the site leads there, any other link to the repository.
    """
    guests = set(list_guests())

    def lead(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        anchor = found[2] or ""
        # On the site, a folder is its README.
        if str((target / "README.md").relative_to(ROOT)) in guests:
            target = target / "README.md"
        if target.is_relative_to(DOCS) or str(target.relative_to(ROOT)) in guests:
            path = os.path.relpath(place_on_site(target), place_on_site(folder))
            return f"]({path}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({repository}/{kind}/main/{target.relative_to(ROOT)}{anchor})"

    return LINK.sub(lead, text)


def place_on_site(path: Path) -> Path:
    """Return the place of a file or folder of the repository on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return GUESTS / path.relative_to(ROOT)
