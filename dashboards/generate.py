"""Writes the dashboards' JSON files, and the ConfigMaps that Grafana's sidecar imports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]

from dashboards.source.engine import engine  # noqa: E402 - found only once the repository is on the path
from dashboards.source.fleet import fleet  # noqa: E402 - likewise
from dashboards.source.grafana import Json  # noqa: E402 - likewise
from dashboards.source.incident import incident  # noqa: E402 - likewise

DASHBOARDS: Final[dict[str, Callable[[], Json]]] = {
    "headroom": engine,
    "headroom-fleet": fleet,
    "headroom-incident": incident,
}
CONFIG_MAPS: Final = "configmaps.yaml"

LEAST_GRAFANA: Final = "10.4.0"

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


def rendered(name: str) -> str:
    """Return the text of a dashboard's JSON file."""
    return written(DASHBOARDS[name]())


def written(made: Json) -> str:
    """Return a dashboard as text."""
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def config_maps() -> str:
    """Return one ConfigMap for each dashboard, in a line: kubectl apply can take 256 KiB of one, the API 1 MiB."""
    return "---\n".join(
        CONFIG_MAP.format(
            name=f"headroom-dashboard-{made.__name__}",
            file=f"{name}.json",
            text=f"    {json.dumps(made(), ensure_ascii=False)}\n",
        )
        for name, made in DASHBOARDS.items()
    )


def exported(name: str) -> str:
    """Return a dashboard as grafana.com takes it: Grafana then prompts for the data source."""
    made = DASHBOARDS[name]()
    source = "${DS_PROMETHEUS}"
    chosen = {"selected": True, "text": source, "value": source}
    made["templating"]["list"][0]["current"] = chosen
    kinds = sorted({panel["type"] for row in made["panels"] for panel in (row, *row.get("panels", ()))} - {"row"})
    prometheus = {"id": "prometheus", "name": "Prometheus"}
    asked = {f"plugin{key.capitalize()}": text for key, text in prometheus.items()}
    needs = [{"type": "grafana", "id": "grafana", "name": "Grafana", "version": LEAST_GRAFANA}]
    needs += [{"type": "datasource", **prometheus, "version": LEAST_GRAFANA}]
    needs += [{"type": "panel", "id": kind, "name": kind, "version": ""} for kind in kinds]
    inputs = [{"name": "DS_PROMETHEUS", "label": "Prometheus", "description": "", "type": "datasource", **asked}]
    return written({"__inputs": inputs, "__elements": {}, "__requires": needs, **made})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every file; for grafana.com into another folder."""
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write the files that grafana.com takes there instead"
    )
    export = parser.parse_args(arguments).export
    folder = export or HERE
    folder.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        text = exported(name) if export else rendered(name)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if not export:
        (HERE / CONFIG_MAPS).write_text(config_maps(), encoding="utf-8")


if __name__ == "__main__":
    main()
