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

DATA_SOURCE: Final = "${DS_PROMETHEUS}"
"""The data source that Grafana prompts for when it imports a dashboard from grafana.com."""

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


def render_dashboard(name: str) -> str:
    """Return the text of a dashboard's JSON file."""
    return format_json(DASHBOARDS[name]())


def format_json(dashboard: Json) -> str:
    """Return a dashboard as text."""
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def render_config_maps() -> str:
    """Return one ConfigMap for each dashboard.

    A dashboard is one line of JSON, because kubectl apply accepts 256 KiB of a ConfigMap, and the API 1 MiB.
    """
    config_maps = []
    for name, build in DASHBOARDS.items():
        text = json.dumps(build(), ensure_ascii=False)
        config_map = CONFIG_MAP.format(
            name=f"headroom-dashboard-{build.__name__}",
            file=f"{name}.json",
            text=f"    {text}\n",
        )
        config_maps.append(config_map)
    return "---\n".join(config_maps)


def render_export(name: str) -> str:
    """Return a dashboard in grafana.com's format: Grafana then prompts for the data source."""
    dashboard = DASHBOARDS[name]()
    source_variable = dashboard["templating"]["list"][0]
    source_variable["current"] = {"selected": True, "text": DATA_SOURCE, "value": DATA_SOURCE}
    requirements = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": LEAST_GRAFANA},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": LEAST_GRAFANA},
    ]
    panel_kinds = list_panel_kinds(dashboard)
    requirements += [{"type": "panel", "id": kind, "name": kind, "version": ""} for kind in panel_kinds]
    source_input = {
        "name": "DS_PROMETHEUS",
        "label": "Prometheus",
        "description": "",
        "type": "datasource",
        "pluginId": "prometheus",
        "pluginName": "Prometheus",
    }
    head = {"__inputs": [source_input], "__elements": {}, "__requires": requirements}
    return format_json(head | dashboard)


def list_panel_kinds(dashboard: Json) -> list[str]:
    """Return the kinds of the dashboard's panels, sorted; a row is not a kind of panel."""
    kinds = set()
    for row in dashboard["panels"]:
        kinds.add(row["type"])
        kinds.update(panel["type"] for panel in row.get("panels", ()))
    return sorted(kinds - {"row"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every file; for grafana.com into another folder."""
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write the files that grafana.com takes there instead"
    )
    export = parser.parse_args(arguments).export
    folder = export or HERE
    folder.mkdir(parents=True, exist_ok=True)
    render = render_export if export else render_dashboard
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(render(name), encoding="utf-8")
    if not export:
        (HERE / CONFIG_MAPS).write_text(render_config_maps(), encoding="utf-8")


if __name__ == "__main__":
    main()
