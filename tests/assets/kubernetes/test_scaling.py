"""The autoscalers ask for load, of engines that do not leak, and name what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.alerts import query_faults
from tests.assets.kubernetes.rendering import COMPONENTS, DEPLOY, documents, find, needs_kustomize, rendered
from tests.assets.promql import parsed, selectors

SCALED: Final = yaml.safe_load((COMPONENTS / "keda" / "scaledobject.yaml").read_text())
HPA: Final = yaml.safe_load((COMPONENTS / "hpa" / "hpa.yaml").read_text())
RULES: Final[list[dict[str, Any]]] = yaml.safe_load(
    (COMPONENTS / "hpa" / "prometheus-adapter-values.yaml").read_text()
)["rules"]["custom"]
TRIGGERS: Final[dict[str, dict[str, Any]]] = {trigger["name"]: trigger for trigger in SCALED["spec"]["triggers"]}

ASKED: Final = (
    {"headroom_engine_requests_waiting", "headroom_leak_state"},
    {"headroom_engine_requests_running", "headroom_engine_additional_requests", "headroom_leak_state"},
    {"headroom_time_to_oom_seconds_lower", "headroom_gpu_up"},
)
"""What is requested, in one query each: load or the time that is left, and never memory."""


def adapted(rule: dict[str, Any], pods: str) -> str:
    """Return the query that prometheus-adapter makes of a rule for these pods."""
    parts = {
        "Series": re.match(r"\w+", rule["seriesQuery"])[0],  # type: ignore[index] # it begins with a name
        "LabelMatchers": f'namespace="vllm",pod=~"{pods}"',
        "GroupBy": "pod",
    }
    return re.sub(r"<<\.(\w+)>>", lambda match: parts[match[1]], rule["metricsQuery"])


KEDA_QUERIES: Final = {name: trigger["metadata"]["query"] for name, trigger in TRIGGERS.items()}
HPA_QUERIES: Final = {
    name: adapted(rule, "vllm-a|vllm-b|vllm-c") for name, rule in zip(("queue", "room"), RULES, strict=True)
}
QUERIES: Final = [*KEDA_QUERIES.values(), *HPA_QUERIES.values(), *(rule["seriesQuery"] for rule in RULES)]


def test_a_query_asks_for_what_there_is(subtests: pytest.Subtests) -> None:
    for query in QUERIES:
        with subtests.test(query=query):
            assert query_faults(query) == []


def test_a_query_asks_for_load_or_for_time_and_never_for_memory(subtests: pytest.Subtests) -> None:
    for query in QUERIES:
        with subtests.test(query=query):
            metrics = {selector.name for selector in selectors(parsed(query))}

            assert any(metrics <= asked_metrics for asked_metrics in ASKED)


def test_the_hpa_asks_for_what_the_adapter_is_asked_to_offer() -> None:
    metric_names = [metric["pods"]["metric"]["name"] for metric in HPA["spec"]["metrics"]]

    assert metric_names == [rule["name"]["as"] for rule in RULES]


@needs_kustomize
@pytest.mark.parametrize("scaler", [SCALED, HPA], ids=["keda", "hpa"])
def test_what_is_scaled_is_the_examples_deployment(scaler: dict[str, Any]) -> None:
    target = scaler["spec"]["scaleTargetRef"]
    deployment = find(documents(rendered(DEPLOY / "example" / "vllm")), target["kind"])

    assert (target["apiVersion"], target["name"]) == (deployment["apiVersion"], deployment["metadata"]["name"])


def test_where_nothing_is_known_the_number_of_replicas_stays() -> None:
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in TRIGGERS.values()} == {"false"}
    assert SCALED["spec"]["minReplicaCount"] >= 1
    assert "fallback" not in SCALED["spec"]


def test_an_average_stands_for_the_engines_that_are_left_out() -> None:
    assert {trigger["metricType"] for trigger in TRIGGERS.values()} == {"Value"}
    assert {metric["pods"]["target"]["type"] for metric in HPA["spec"]["metrics"]} == {"AverageValue"}


def series(pod: str, *, waiting: int, running: int, leaking: bool) -> list[dict[str, str]]:
    """Return a pod of two data-parallel engines and two GPUs, of which the second leaks or not."""
    target = f'namespace="vllm",pod="{pod}",job="vllm/vllm-headroom",instance="{pod}:9839"'
    gpus = [(gpu, int(leaking and gpu == "1")) for gpu in ("0", "1")]
    return [
        *(
            {"series": f'{name}{{{target},model_name="m",engine="{engine}"}}', "values": f"{value}x1"}
            for engine in ("0", "1")
            for name, value in (
                ("headroom_engine_requests_waiting", waiting),
                ("headroom_engine_requests_running", running),
                ("headroom_engine_additional_requests", 4 - running),
            )
        ),
        *(
            {
                "series": f'headroom_leak_state{{{target},gpu="{gpu}",uuid="GPU-{gpu}",state="{state}"}}',
                "values": f"{value}x1",
            }
            for gpu, leaks in gpus
            for state, value in (("leaking", leaks), ("stable", 1 - leaks))
        ),
    ]


def list_expected_samples(values: dict[str, float]) -> list[dict[str, Any]]:
    """Return samples as promtool expects them."""
    return [{"labels": f'{{pod="{pod}"}}' if pod else "{}", "value": value} for pod, value in values.items()]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH: install Prometheus")
@pytest.mark.parametrize(
    ("query", "all_well", "one_leaks"),
    [
        (KEDA_QUERIES["queue"], {"": 26}, {"": 5}),
        (KEDA_QUERIES["room"], {"": 0.5}, {"": 0.375}),
        (HPA_QUERIES["queue"], {"vllm-a": 4, "vllm-b": 6, "vllm-c": 68}, {"vllm-a": 4, "vllm-b": 6}),
        (
            HPA_QUERIES["room"],
            {"vllm-a": 0.25, "vllm-b": 0.5, "vllm-c": 0.75},
            {"vllm-a": 0.25, "vllm-b": 0.5},
        ),
    ],
    ids=["keda queue", "keda room", "hpa queue", "hpa room"],
)
def test_an_engine_that_leaks_does_not_count(
    tmp_path: Path, query: str, all_well: dict[str, float], one_leaks: dict[str, float]
) -> None:
    def pods(*leaking: str) -> list[dict[str, str]]:
        load = (("vllm-a", 2, 1), ("vllm-b", 3, 2), ("vllm-c", 34, 3))
        return [
            a_series
            for pod, waits, runs in load
            for a_series in series(pod, waiting=waits, running=runs, leaking=pod in leaking)
        ]

    nothing: dict[str, float] = {}
    cases = ((pods(), all_well), (pods("vllm-c"), one_leaks), (pods("vllm-a", "vllm-b", "vllm-c"), nothing))
    file = tmp_path / "test.yaml"
    tests = [
        {
            "input_series": fed,
            "promql_expr_test": [{"expr": query, "eval_time": "1m", "exp_samples": list_expected_samples(expected)}],
        }
        for fed, expected in cases
    ]
    file.write_text(yaml.safe_dump({"tests": tests}))

    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH: install Prometheus")
def test_an_engine_about_to_end_has_its_successor_before(tmp_path: Path) -> None:
    def fleet(*left_seconds: int) -> list[dict[str, str]]:
        targets = [f'namespace="vllm",pod="vllm-{place}",gpu="0",uuid="GPU-{place}"' for place in range(4)]
        ups = [{"series": f"headroom_gpu_up{{{target}}}", "values": "1x1"} for target in targets]
        times = zip(targets, left_seconds, strict=False)
        return ups + [
            {"series": f"headroom_time_to_oom_seconds_lower{{{target}}}", "values": f"{seconds}x1"}
            for target, seconds in times
        ]

    cases = ((fleet(), 0.0), (fleet(7200), 0.0), (fleet(600, 7200), 1.25), (fleet(600, 60, 60, 60), 2.0))
    file = tmp_path / "test.yaml"
    leaving_query = KEDA_QUERIES["leaving"]
    tests = [
        {
            "input_series": fed,
            "promql_expr_test": [
                {"expr": leaving_query, "eval_time": "1m", "exp_samples": list_expected_samples({"": value})}
            ],
        }
        for fed, value in cases
    ]
    file.write_text(yaml.safe_dump({"tests": tests}))

    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
