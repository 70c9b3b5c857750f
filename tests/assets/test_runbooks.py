"""Every alert has its runbook, which asks for what there is and names flags that vLLM has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.assets.alerts import query_faults, rules, unknown_alerts
from tests.assets.runbooks import RUNBOOKS, flag_faults, page_queries, unknown_metrics
from vllm_headroom.trace.flight import FLIGHT, SPOILED

OVERVIEW: Final = "README"
"""The page in alerts/runbooks that is no alert's."""

HEADINGS: Final = ["Meaning", "Impact", "Diagnosis", "Mitigation"]

ALERTS: Final = {rule.name for rule in rules() if rule.is_alert}

OF_NVIDIA: Final = re.compile(r"nvidia-smi|/dev/nvidia|nvrm|nvidia-bug-report")
OF_AMD: Final = re.compile(r"amd-smi|/dev/kfd|amdgpu|AMD")


def test_the_record_is_put_together_in_its_order_and_without_what_was_set_aside(tmp_path: Path) -> None:
    commands = {
        match for page in RUNBOOKS.values() for match in re.findall(r"&& (cat [^']+)'", page) if FLIGHT in match
    }
    for name in (FLIGHT, f"{FLIGHT}.1", SPOILED):
        (tmp_path / name).write_text(f"{name}\n")
    outputs = [
        subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True).stdout
        for command in commands
    ]

    assert outputs == [f"{FLIGHT}.1\n{FLIGHT}\n".encode()]


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert RUNBOOKS.keys() - {OVERVIEW} == ALERTS


def test_a_runbook_says_what_where_why_and_what_to_do(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            headings = re.findall(r"^## (.+)$", RUNBOOKS[page], re.MULTILINE)

            assert RUNBOOKS[page].startswith(f"# {page}\n") or page == OVERVIEW
            assert headings == HEADINGS or page == OVERVIEW


def test_the_runbook_of_a_page_begins_with_what_stops_keeps_and_explains() -> None:
    paging = {rule.name for rule in rules() if rule.is_alert and rule.labels.get("severity") == "page"}
    heads = {name: RUNBOOKS[name].partition("```sh")[0] for name in paging}
    steps = {name: re.findall(r"^(\d)\. \*\*(.+?):\*\*", head, re.MULTILINE) for name, head in heads.items()}

    assert paging
    expected = [("1", "Stop the bleeding"), ("2", "Keep the evidence"), ("3", "Then find out")]
    assert {name for name in paging if steps[name] != expected} == set()


def test_a_runbook_asks_for_metrics_labels_and_words_that_there_are(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            queries = page_queries(RUNBOOKS[page])

            assert [fault for query in queries for fault in query_faults(query)] == []
            assert unknown_metrics(RUNBOOKS[page]) == set()


def test_what_a_command_takes_from_the_shell_is_set_on_the_page(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            page_text = re.sub(r"^```promql\n.*?^```", "", RUNBOOKS[page], flags=re.DOTALL | re.MULTILINE)
            explained = {"HEADROOM_PROBE_DIR", "HEADROOM_STATE_DIR", "KEY", "NF", "PID", "USER"}
            shell_variables = set(re.findall(r"\$([A-Z_]+)", page_text)) - explained

            assert page == OVERVIEW or shell_variables <= set(re.findall(r"\b([A-Z_]+)=", page_text))


def test_what_kubectl_does_has_a_form_for_a_bare_machine(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            blocks = re.findall(r"^```sh\n(.*?)^```", RUNBOOKS[page], re.DOTALL | re.MULTILINE)
            forms = re.findall(r"^\| (`kubectl .*?) \|", RUNBOOKS[OVERVIEW], re.MULTILINE)
            listed = {verb for form in forms for verb in re.findall(r"`(?:kubectl )?([a-z-]+)", form)}

            assert [block for block in blocks if "kubectl" in block and "Without Kubernetes" not in block] == []
            assert set(re.findall(r"kubectl ([a-z-]+)", RUNBOOKS[page])) <= listed
            assert page == OVERVIEW or "instead of kubectl: README.md" in RUNBOOKS[page]


def test_a_runbook_names_only_alerts_that_there_are(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            assert unknown_alerts(RUNBOOKS[page]) == set()


def test_a_runbook_names_only_flags_that_vllm_has(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            assert flag_faults(RUNBOOKS[page]) == []


def test_a_command_of_nvidia_s_has_amd_s_beside_it(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page):
            if page == "HeadroomGpuXid":
                assert "Only NVIDIA's driver has XIDs" in RUNBOOKS[page]
                continue
            page_lines = [
                line for line in RUNBOOKS[page].splitlines() if not line.startswith("# Without Kubernetes")
            ]  # said above it
            near = [
                "\n".join(page_lines[place - 1 : place + 2])
                for place, line in enumerate(page_lines)
                if OF_NVIDIA.search(line)
            ]
            assert [passage for passage in near if not OF_AMD.search(passage)] == []


@pytest.mark.parametrize(
    ("counts", "drained"), [((3, 0), False), ((0, 2), False), ((0, 0), True), ((), False)], ids=str
)
def test_a_drain_is_over_when_nothing_runs_or_waits_whatever_the_model_is_called(
    counts: tuple[int, ...],
    drained: bool,  # noqa: FBT001
) -> None:
    waits = {match for text in RUNBOOKS.values() for match in re.findall(r"until page \| (awk '.*?');", text)}
    names = ("running", "waiting")
    labels = '{engine="0",model_name="My model 7B"}'
    page = "".join(f"headroom_engine_requests_{name}{labels} {n}.0\n" for name, n in zip(names, counts, strict=False))

    assert waits
    for wait in waits:
        completed = subprocess.run(["sh", "-c", wait], input=page, text=True, check=False)
        assert (completed.returncode == 0) is drained, wait


@pytest.mark.parametrize(
    ("page", "expected_flags"),
    [
        ("lower `--max-num-seqs`, then run `kubectl logs --previous`", []),
        ("set `--max-sequences 4`", ["--max-sequences"]),
        ("    vllm serve model --max-num-seqs 8 --enable-budget", ["--enable-budget"]),
        ("use --disable-prefix-cache", ["--disable-prefix-cache"]),
    ],
)
def test_a_flag_that_vllm_does_not_have_is_found(page: str, expected_flags: list[str]) -> None:
    assert flag_faults(page) == expected_flags


def test_a_name_in_a_page_that_is_no_metric_is_found() -> None:
    known_text = "`headroom_gpu_up`, headroom_gpu_*, namespace_model:headroom_gpus:sum, vllm_headroom"

    assert unknown_metrics(f"{known_text}, headroom_gone, headroom_no*") == {"headroom_gone", "headroom_no"}


def test_a_pattern_that_finds_no_metric_is_found() -> None:
    page = "grep -E '^headroom_(leak_state.* 1|gpu_(up|down)|sourc)' and awk '/^headroom_engine_(awake|asleep)/ {n++}'"

    assert unknown_metrics(page) == {"headroom_gpu_down", "headroom_engine_asleep"}
