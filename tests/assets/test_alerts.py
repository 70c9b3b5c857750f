"""Every alert fires and keeps quiet as its tests say, asks for what there is and can be read at night."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from alerts.tests.situations import ILL
from tests.assets import alerts
from tests.assets.promql import RULES, read_yaml
from tests.assets.runbooks import flag_faults

RULE_LIST: Final = alerts.rules()
ALERTS: Final = [rule for rule in RULE_LIST if rule.is_alert]
OF_MANY: Final = {"HeadroomModelDown", "HeadroomReplicasLost", "HeadroomModelCrashLoop", "HeadroomAbsent"}
"""Alerts on a model or a job, not on one engine."""

NAMES: Final = {alert.name for alert in ALERTS}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH: install Prometheus (Debian: prometheus)"
)


@needs_promtool
def test_prometheus_accepts_the_rules(subtests: pytest.Subtests) -> None:
    for path in sorted(RULES.glob("*.yaml")):
        with subtests.test(path.name):
            _promtool("check", "rules", str(path))


@needs_promtool
@pytest.mark.parametrize("path", alerts.TESTS, ids=lambda path: path.name)
def test_the_alerts_fire_and_keep_quiet_as_their_tests_say(path: Path, tmp_path: Path) -> None:
    _promtool("test", "rules", *map(str, alerts.narrowed(path, tmp_path)))


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_asks_for_metrics_labels_and_words_that_there_are(subtests: pytest.Subtests) -> None:
    for rule in RULE_LIST:
        with subtests.test(rule.name):
            assert alerts.query_faults(rule.expr) == []


def test_a_text_asks_for_metrics_labels_and_words_that_there_are(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert.name):
            queries = [query for text in alert.annotations.values() for query in alerts.template_queries(text)]

            assert [fault for query in queries for fault in alerts.query_faults(query)] == []


def test_a_text_names_labels_that_the_alert_has(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert.name):
            named = set(re.findall(r"\$labels\.(\w+)", " ".join(alert.annotations.values())))

            assert named <= alerts.kept_labels(alert.expr)


def test_an_alert_can_be_routed_read_and_followed(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert.name):
            texts = alert.annotations

            assert alert.labels["severity"] in {"page", "critical", "warning", "info"}
            assert alert.labels["area"] in {"memory", "engine", "gpu", "sidecar"}
            assert alert.labels.keys() <= {"severity", "area", "model_name", "began"}
            assert texts.keys() == {"summary", "description"}, "links are put in by alerts/generate.py"
            assert texts["summary"].endswith(".")
            # By these the link to the board of its engine is made.
            of_engine = alert.name not in OF_MANY
            assert alerts.kept_labels(alert.expr) >= {"namespace", "pod", "instance"} or not of_engine
            assert "{{ or $labels.pod $labels.instance }}" in texts["description"] or not of_engine


def test_a_text_keeps_no_threshold_that_a_value_of_the_chart_changes(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert.name):
            written = " ".join(alert.annotations.values())
            figures = re.findall(r"\d[\d.]*", re.sub(r"\{\{.*?\}\}", "", written)) + re.findall(
                r"[<>]=? ([\d.]+)", written
            )

            assert not set(re.findall(r"[<>=] ([^#<>=\n]+?) # \w+", alert.expr)) & set(figures)


def test_an_alert_names_only_flags_that_vllm_has(subtests: pytest.Subtests) -> None:
    for alert in ALERTS:
        with subtests.test(alert.name):
            marked = re.sub(r"(?<!\S)(--[a-z-]+)", r"`\1`", alert.annotations["description"])

            assert flag_faults(marked) == []


def test_every_alert_is_seen_to_fire_and_to_keep_quiet() -> None:
    expected = list(alerts.expectations())
    played = {name for situation in ILL for name in situation.fires}

    assert {name for name, firing in expected if firing} | played == NAMES
    assert {name for name, firing in expected if not firing} | played == NAMES, "what is played is silent elsewhere"


def test_the_tests_feed_what_the_daemon_exports() -> None:
    assert [fault for series in sorted(alerts.input_series()) for fault in alerts.series_faults(series)] == []


def test_a_test_evaluates_the_groups_in_their_order_which_promtool_takes_by_chance(subtests: pytest.Subtests) -> None:
    for path in alerts.TESTS:
        with subtests.test(path.name):
            order = read_yaml(path.read_text(encoding="utf-8")).get("group_eval_order")

            assert order == [group["name"] for group in read_yaml((RULES / "headroom.yaml").read_text())["groups"]]


def test_a_test_names_only_alerts_that_there_are(subtests: pytest.Subtests) -> None:
    for path in alerts.TESTS:
        with subtests.test(path.name):
            assert alerts.unknown_alerts(path.read_text(encoding="utf-8")) == set()


def test_what_is_read_at_night_reads_well() -> None:
    rendered = {
        alert["exp_annotations"][part]
        for _, firing in alerts.expectations()
        for alert in firing
        for part in ("summary", "description")
    }

    assert [fault for text in sorted(rendered) for fault in alerts.text_faults(text)] == []


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("headroom_gpu_memory_user_bytes", "there is no metric headroom_gpu_memory_user_bytes"),
        ("rate(headroom_engine_preemptions[5m])", "there is no metric headroom_engine_preemptions"),
        ('headroom_gpu_up{model_name="x"}', "headroom_gpu_up has no label model_name"),
        ('max_over_time(headroom_leak_state{state=~"growing|leaky"}[5m])', "state is never leaky"),
        ('headroom_engine_state{state="leaking"}', "state is never leaking"),
        ('headroom_leak_state{state="down"}', "state is never down"),
        ('headroom_input_available{input!~"kv_cache_usage|kv_usage"}', "input is never kv_usage"),
        ("sum by (uid) (headroom_gpu_up)", "what sum is over has no label uid"),
        ("headroom_gpu_up and on (gpus) headroom_gpu_info", "the left of and has no label gpus"),
        ("headroom_gpu_up and headroom_gpu_info", "the sides of and never match: only one has attribution, name"),
        ("sum(headroom_gpu_up", "unclosed left parenthesis: sum(headroom_gpu_up"),
    ],
)
def test_an_expression_that_asks_for_what_there_is_not_is_found(expr: str, fault: str) -> None:
    assert fault in alerts.query_faults(expr)


@pytest.mark.parametrize(
    ("series", "fault"),
    [
        ('headroom_gpu_up{job="j",instance="i",gpu="0"}', "headroom_gpu_up needs the label uuid"),
        ('headroom_gpu_up{job="j",gpu="0",uuid="u"}', "headroom_gpu_up needs the label instance"),
        ('headroom_gpu_up{job="j",instance="i",gpu="0",uuid="u",pid="1"}', "headroom_gpu_up has no label pid"),
        ('up{job="j"}', "up needs the label instance"),
    ],
)
def test_a_series_that_no_daemon_exports_is_found(series: str, fault: str) -> None:
    assert alerts.series_faults(series) == [fault]


def test_the_name_of_no_alert_is_found() -> None:
    assert alerts.unknown_alerts("HeadroomGpuHot, HeadroomGpu.+, HeadroomGpuCold") == {"HeadroomGpuCold"}


def test_the_queries_of_a_template_are_all_found() -> None:
    text = '{{ with printf "x{a=%q,b=\\"c\\"}" $labels.a | query }}{{ . | first | value }}{{ end }}'

    assert alerts.template_queries(f"{text} and {text}") == ['x{a="",b="c"}'] * 2
    with pytest.raises(ValueError, match="cannot be read"):
        alerts.template_queries('{{ query "up" | first | value }}')


@pytest.mark.parametrize("text", ["1 requests run.", "12  run.", "NaNB free.", "A , b.", "<no value>.", "%!q(x).", "a"])
def test_a_text_that_reads_badly_is_found(text: str) -> None:
    assert alerts.text_faults(text)
