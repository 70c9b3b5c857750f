"""Writes the dashboards' JSON files, and the ConfigMaps that Grafana's sidecar imports."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from dashboards.source.around import CELL, RUNBOOK, RUNBOOKS  # noqa: E402 - found only once the repository is on the path
from dashboards.source.engine import engine  # noqa: E402 - likewise
from dashboards.source.fleet import fleet  # noqa: E402 - likewise
from dashboards.source.grafana import Json  # noqa: E402 - likewise
from dashboards.source.incident import incident  # noqa: E402 - likewise

DASHBOARDS: Final[dict[str, Callable[[], Json]]] = {
    "headroom": engine,
    "headroom-fleet": fleet,
    "headroom-incident": incident,
}
CONFIG_MAPS: Final = "configmaps.yaml"

CONFIG_MAP: Final = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  labels:
    grafana_dashboard: "1"
  annotations:
    grafana_folder: Headroom
data:
  {file}: |
{text}"""


def rendered(name: str, runbooks_url: str = RUNBOOKS) -> str:
    """Return the text of a dashboard's JSON file; `{alert}` in the URL stands for the alert's name, or it ends it."""
    runbook = runbooks_url if "{alert}" in runbooks_url else f"{runbooks_url}/{{alert}}"
    text = json.dumps(DASHBOARDS[name](), indent=2, ensure_ascii=False) + "\n"
    text = text.replace(RUNBOOK, runbook.replace("{alert}", CELL))
    return text.replace(RUNBOOKS, runbook.partition("{alert}")[0].rstrip("/"))


def config_maps(runbooks_url: str = RUNBOOKS) -> str:
    """Return one ConfigMap for each dashboard; kubectl apply can take 256 KiB of one, the API 1 MiB."""
    return "---\n".join(
        CONFIG_MAP.format(
            name=f"headroom-dashboard-{made.__name__}",
            file=f"{name}.json",
            text=textwrap.indent(rendered(name, runbooks_url), "    "),
        )
        for name, made in DASHBOARDS.items()
    )


def url(text: str) -> str:
    """Return a base of addresses without the slash at its end, as alerts/generate.py takes it."""
    if not re.fullmatch(r"https?://[\w.~:/@%+,=\[\]#-]+", text.replace("{alert}", "alert"), re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no base of addresses: write it like https://runbooks.your.org")
    return text.rstrip("/")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every file."""
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--runbooks-url",
        type=url,
        default=RUNBOOKS,
        metavar="URL",
        help="where alerts/runbooks is served; {alert} in it stands for the alert's name, which else goes to its end",
    )
    parser.add_argument("--into", type=Path, default=HERE, metavar="FOLDER", help="default: beside this program")
    options = parser.parse_args(arguments)
    for name in DASHBOARDS:
        (options.into / f"{name}.json").write_text(rendered(name, options.runbooks_url), encoding="utf-8")
    (options.into / CONFIG_MAPS).write_text(config_maps(options.runbooks_url), encoding="utf-8")


if __name__ == "__main__":
    main()
