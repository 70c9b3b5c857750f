"""Say whether a tag may be released: every file has its version, and the changelog a dated section with text.

usage: check_release.py TAG, or without a tag for the version in pyproject.toml, whose section may still be "Unreleased"
"""

import re
import sys
import tomllib
from pathlib import Path

CHARTS = ("vllm-headroom", "vllm-headroom-cluster")


def faults(root: Path, tag: str | None) -> list[str]:
    """Return what keeps the tag from a release, a sentence each."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = [] if tag in (None, f"v{version}") else [f"the tag is {tag}, pyproject.toml has {version}"]
    versions = {"Dockerfile": r"^ARG VERSION=(.+)$"}
    versions |= {f"deploy/helm/{chart}/Chart.yaml": r"^(?:version|appVersion): (.+)$" for chart in CHARTS}
    for name, pattern in versions.items():
        others = set(re.findall(pattern, (root / name).read_text(), re.MULTILINE)) - {version}
        found += [f"{name} has {other}, pyproject.toml has {version}" for other in sorted(others)]
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$" if tag else r"^## \[[^\n]+$"
    changes = (root / "CHANGELOG.md").read_text()
    section = re.search(rf"{heading}\n(.*?)(?=^## \[|\Z)", changes, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        found.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with text")
    return found


if __name__ == "__main__":
    problems = faults(Path(__file__).parents[1], sys.argv[1] if sys.argv[1:] else None)
    sys.exit("\n".join(problems) or None)
