"""A copy of the source takes what a newcomer adds in as few places as CONTRIBUTING.md has, and works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import vllm_headroom

SOURCE: Final = Path(vllm_headroom.__file__).parent
LOOK: Final = """
import json, sys
from vllm_headroom_tools.doctor.engine import SERIES
from vllm_headroom.derive.tick import build_derivations
from vllm_headroom.derive.tick import answer
from vllm_headroom.model import Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom_tools.trace import parse_trace
from vllm_headroom.trace.entries import HEADER, encode_line, build_record

page = parse_engines(sys.stdin.read())
seen = Snapshot(time_seconds=1.0, monotonic_seconds=1.0, engines=page, gpus=(), processes=())
(back,) = parse_trace((encode_line(HEADER), encode_line(build_record(seen))))
print(json.dumps({
    "profile": page.profile,
    "page": {s.metric.name: s.value for each in build_derivations() for s in answer(each, each.initial, seen)[1]},
    "inputs": dict(page.inputs),
    "record": build_record(seen)["engines"][0],
    "kept": back.engines.engines == page.engines,
    "doctor": {name: [metric.name for metric in made] for name, made in SERIES.items()},
}))
"""
PAGE: Final = 'vllm:num_requests_running{model_name="m",engine="0"} 4\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    copy = tmp_path / "vllm_headroom"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def add(file: Path, line_start: str, added: str) -> None:
    """Add lines after the one line that begins with `after`."""
    text, replacements = re.subn(
        rf"^({line_start}.*\n)", lambda line: line[1] + added, file.read_text(), flags=re.MULTILINE
    )
    assert replacements == 1, (file, line_start)
    file.write_text(text)


def look(source: Path, page: str) -> dict[str, Any]:
    """Return what the copy reports about a page."""
    process = subprocess.run(
        [sys.executable, "-c", LOOK],
        input=page,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(source.parent)},
    )
    assert process.returncode == 0, process.stderr
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def test_a_raw_fact_takes_three_places(source: Path) -> None:
    add(
        source / "model" / "engine.py",
        "    waiting:",
        '    swapped: Annotated[float | None, _input("requests_swapped", "requests_swapped")] = None\n',
    )
    add(
        source / "parse/profiles/vllm.py",
        r'        Fact\("waiting"',
        '        Fact("swapped", ("num_requests_swapped",)),\n',
    )
    add(
        source / "catalog.py",
        "HOST_SHM_LIMIT",
        'ENGINE_SWAPPED: Final = _declare_gauge("engine_requests_swapped", ENGINE_LABELS, "Requests swapped out.")\n',
    )

    survey = look(source, PAGE + 'vllm:num_requests_swapped{model_name="m",engine="0"} 7\n')

    assert survey["page"]["headroom_engine_requests_swapped"] == 7.0
    assert survey["inputs"]["requests_swapped"]
    assert (survey["record"]["swapped"], survey["kept"]) == (7.0, True)
    assert survey["doctor"]["requests_swapped"] == ["headroom_engine_requests_swapped"]


def test_a_derived_metric_takes_three_places_and_its_test(source: Path) -> None:
    add(
        source / "catalog.py",
        "HOST_SHM_LIMIT",
        'ENGINE_HALF: Final = _declare_gauge("engine_half", ENGINE_LABELS, "Half of what runs.", needs=("running",))\n',
    )
    (source / "derive/half.py").write_text(
        "from vllm_headroom import catalog\n"
        "from vllm_headroom.model import Sample\n\n\n"
        "def half(snapshot):\n"
        '    return (Sample(catalog.ENGINE_HALF, ("m", "0"), snapshot.engines.engines[0].running / 2),)\n'
    )
    add(
        source / "derive/tick.py",
        "from vllm_headroom.derive.health",
        "from vllm_headroom.derive.half import half\n",
    )
    add(source / "derive/tick.py", r'        make_stateless\("readings"', '        make_stateless("half", half),\n')

    survey = look(source, PAGE)

    assert survey["page"]["headroom_engine_half"] == 2.0
    assert "headroom_engine_half" in survey["doctor"]["requests_running"]


def test_an_engine_takes_one_file_and_its_name_in_the_table(source: Path) -> None:
    (source / "parse/profiles/other.py").write_text(
        "from vllm_headroom.parse.profile import Fact, Profile\n\n"
        "OTHER = Profile(\n"
        '    name="other", product="Other", switch="always", prefixes=("other:",),\n'
        '    facts=(Fact(field="running", families=("busy",)),),\n'
        ")\n"
    )
    profiles = source / "parse/profiles/__init__.py"
    add(profiles, "from vllm_headroom.parse.profiles.vllm", "from vllm_headroom.parse.profiles.other import OTHER\n")
    add(profiles, "    VLLM,", "    OTHER,\n")

    survey = look(source, 'other:busy{model_name="m",engine="0"} 3\n')

    assert (survey["profile"], survey["page"]["headroom_engine_requests_running"]) == ("other", 3.0)
    assert [name for name, is_there in survey["inputs"].items() if is_there] == ["requests_running"]
