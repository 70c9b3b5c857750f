from __future__ import annotations

from pathlib import Path

import pytest

from vllm_headroom_tools.doctor.command import build_report, find_place
from vllm_headroom_tools.doctor.fixes import Check, Fix, Status
from vllm_headroom_tools.terminal import TEXT_WIDTH

FINE = Check(Status.OK, "NVML answers, driver 580.95.05")
UNSET = Check(Status.NOT_APPLICABLE, "HEADROOM_STATE_DIR is not set")
UNKNOWN = Check(Status.UNKNOWN, "needs NVML, see nvml")
MISSING = Check(
    Status.MISSING,
    "vLLM answers, but none of its processes shows here " * 3,
    details=("a detail",),
    absent=("headroom_host_*",),
    fixes=(
        Fix(where="in the pod's spec", lines=("shareProcessNamespace: true",)),
        Fix(where="with compose", lines=("services:", '  pid: "service:vllm"')),
    ),
)
ALL = {"nvml": FINE, "processes": MISSING, "gpus": UNKNOWN, "state_dir": UNSET}


def test_each_finding_is_a_line_with_its_mark_and_the_fix_below() -> None:
    assert list(build_report(ALL, "0.1.0").lines) == [
        "ok       nvml             NVML answers, driver 580.95.05",
        "MISSING  processes        vLLM answers, but none of its processes shows here vLLM answers, but none of its",
        "                          processes shows here vLLM answers, but none of its processes shows here",
        "           a detail",
        "         absent   headroom_host_*",
        "         fix      in the pod's spec:",
        "                    shareProcessNamespace: true",
        "         or       with compose:",
        "                    services:",
        '                      pid: "service:vllm"',
        "",
        "unknown  gpus             needs NVML, see nvml",
        "-        state_dir        HEADROOM_STATE_DIR is not set",
        "",
        "1 missing and 1 unknown, of 4.",
    ]


@pytest.mark.parametrize(
    ("environ", "marker", "first_fix"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ".dockerenv", "         fix here in the pod's spec:"),
        ({}, ".dockerenv", "         fix here with compose:"),
        ({}, "other", "         fix      in the pod's spec:"),
    ],
)
def test_the_fix_for_where_it_runs_is_marked_and_comes_first(
    environ: dict[str, str], marker: str, first_fix: str, tmp_path: Path
) -> None:
    (tmp_path / marker).touch()
    report = build_report(ALL, "0.1.0", find_place(environ, tmp_path))

    fixes = [line for line in report.lines if line.startswith(("         fix", "         or "))]
    assert fixes[0] == first_fix
    assert [line[9:11] for line in fixes] == ["fi", "or"]
    assert report.data["checks"][1]["fix"][0]["where"] == first_fix[18:-1]


def test_that_nothing_is_missing_is_said() -> None:
    assert [*build_report({"nvml": FINE, "state_dir": UNSET}, "0.1.0").lines][-1] == "Nothing is missing."


def test_the_text_fits() -> None:
    report = build_report({"engine": Check(Status.MISSING, "model" + " word" * 99)}, "0.1.0").lines

    assert max(map(len, report)) <= TEXT_WIDTH


@pytest.mark.parametrize(
    ("findings", "available"),
    [((FINE, UNSET), True), ((FINE, UNKNOWN), False), ((FINE, MISSING), False)],
    ids=["not-set", "unknown", "missing"],
)
def test_everything_is_available_when_nothing_is_missing_or_unknown(
    findings: tuple[Check, ...],
    available: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    report = build_report({str(place): finding for place, finding in enumerate(findings)}, "0.1.0").data

    assert report["ok"] is available


def test_the_document_has_the_same_keys_for_every_finding() -> None:
    report = build_report(ALL, "0.1.0").data
    fine, missing, unknown, unset = report["checks"]

    assert (report["ok"], report["version"]) == (False, "0.1.0")
    assert fine == {
        "name": "nvml",
        "state": "ok",
        "ok": True,
        "found": "NVML answers, driver 580.95.05",
        "missing": None,
        "reason": None,
        "details": [],
        "absent": [],
        "fix": [],
    }
    assert (missing["ok"], missing["missing"], missing["found"]) == (False, MISSING.text, None)
    assert missing["fix"][0] == {"where": "in the pod's spec", "lines": ["shareProcessNamespace: true"]}
    assert (unknown["ok"], unknown["reason"]) == (None, UNKNOWN.text)
    assert (unset["ok"], unset["state"], unset["reason"]) == (None, "not_applicable", UNSET.text)
