"""The marks of what was rolled out are where another image or version comes beside an earlier one, and only there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.dashboards.grafana import filled, load, marked
from tests.dashboards.store import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not on the PATH: {missing()} (Debian: prometheus)")

PUT_IN: Final = {**dict.fromkeys(("cluster", "namespace", "job"), ".*"), "__interval": "1m"}
SIDECAR: Final = 'headroom_build_info{namespace="ml",job="ml/vllm-headroom",pod="%s",version="%s"}'
CONTAINER: Final = 'kube_pod_container_info{namespace="ml",pod="%s",container="vllm",image="vllm/vllm-openai:%s"}'
RUNS: Final = "1x10"
COMES: Final = "_x5 1x5"
GOES: Final = "1x7 _x3"
RETURNS: Final = "1x2 _x3 1x5"


@pytest.mark.parametrize(
    ("pods", "new_image"),
    [
        ([("a", "v0.31", RUNS)], None),
        ([("a", "v0.31", GOES), ("b", "v0.32", COMES)], "vllm/vllm-openai:v0.32"),
        ([("a", "v0.31", GOES), ("b", "v0.31", COMES)], None),
        ([("a", "v0.31", COMES)], None),
        ([("a", "v0.31", RETURNS)], None),
    ],
    ids=["nothing is rolled out", "another image", "another pod of the image", "the first pod", "pods that come back"],
)
def test_an_image_is_marked_when_it_comes_beside_another(
    tmp_path: Path, pods: list[tuple[str, str, str]], new_image: str | None
) -> None:
    series = {CONTAINER % (pod, image): values for pod, image, values in pods}
    series |= {SIDECAR % (pod, "1.0"): values for pod, _, values in pods}

    marks = [] if new_image is None else [f'{{namespace="ml",container="vllm",image="{new_image}"}}']
    expect(tmp_path, "New image", series, marks)


def test_a_version_of_the_sidecar_is_marked_when_it_comes_beside_another(tmp_path: Path) -> None:
    series = {SIDECAR % ("a", "1.0"): GOES, SIDECAR % ("b", "1.1"): COMES}

    expect(
        tmp_path,
        "New version of the sidecar",
        series,
        ['{namespace="ml",job="ml/vllm-headroom",version="1.1"}'],
    )


def expect(folder: Path, mark: str, series: dict[str, str], labels: list[str]) -> None:
    """Check which series a mark has when the sixth minute begins, and that it has none in the minute after."""
    (expr,) = (query.expr for query in marked(load("headroom")) if query.where == mark)
    expression_tests = [
        {
            "expr": filled(expr, PUT_IN),
            "eval_time": "5m",
            "exp_samples": [{"labels": label, "value": 1} for label in labels],
        },
        {"expr": filled(expr, PUT_IN), "eval_time": "6m", "exp_samples": []},
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": expression_tests,
    }
    (folder / "test.yaml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
