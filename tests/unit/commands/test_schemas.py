"""Each command's own object has the shape that its schema promises."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from tests.command import run_command
from tests.engine_logs import DEATH, VLLM_0_19
from tests.unit.commands.advise import traces as advise_traces
from tests.unit.commands.load import test_document as loads
from tests.unit.commands.postmortem import scenes
from tests.unit.commands.postmortem.test_postmortem import write
from tests.unit.commands.preflight.conftest import nvml, preflight
from tests.unit.commands.preflight.looking import Preflight
from tests.unit.commands.replay.traces import flat, leaking, text
from tests.unit.commands.schemas import write_schema
from tests.unit.commands.watch.test_watch import sidecar
from vllm_headroom_tools import cli
from vllm_headroom_tools.cli import COMMANDS, find_command
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.preflight.report import build_report as report_clearance
from vllm_headroom_tools.probe.report import report_recorded
from vllm_headroom_tools.probe.snapshot import report_taken

__all__ = ["nvml", "preflight"]

FOLDER: Final = Path(cli.__file__).parent / "schemas"
MODEL: Final = ("--layers", "32", "--kv-heads", "8", "--head-size", "128")
WHOLE: Final = ("--hidden-size", "4096", "--vocabulary", "128256", "--max-model-len", "8192", "--gpu-memory", "80GiB")
LIMITS: Final = ("--max-leak-per-thousand-requests", "1MiB", "--max-restarts", "0", "--max-discrepancy", "5%")
BUDGET: Final = ("--gpu-memory-utilization", "0.9")
NOBODY: Final = "http://127.0.0.1:9"
STACK: Final = {"bytes": 5, "count": 1, "stack": ["a.py:1"]}
PROCESS: Final = {"pid": 7, "role": "worker", "data_parallel_rank": 0, "problem": None}
RECORDED: Final = {
    "cost": {"pause_seconds": 0.1, "cpu_seconds": None, "memory_bytes": 3},
    "host": [STACK],
    "gpu": [],
    "mappings": {"heap": 5},
    "native": [{"faults": 256, "stack": ["f (g.so)"]}],
}
SNAPSHOT: Final[dict[str, Any]] = {
    "pid": 7,
    "role": "worker",
    "problem": None,
    "file": "/snapshots/requested-7-1.pickle",
    "bytes": 9,
    "pause_seconds": 0.1,
    "largest": [{"file": "/site/a.py", "line": 3, "bytes": 8, "count": 2, "since": 1.0}],
}
UNRECORDED: Final = dict.fromkeys(("note", "cost", "host", "gpu"))


def printed(name: str, *words: str, **environ: str) -> dict[str, Any]:
    done = run_command(name, *words, "--json", **environ)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["status"] == done.returncode
    return document


def list_objects(name: str, folder: Path, looking: Preflight) -> Iterator[dict[str, Any]]:
    """Yield what the command prints of a good and a bad subject, and of a mistake."""
    trace, quiet = folder / "leak.jsonl", folder / "flat.jsonl"
    trace.write_text(text(leaking(3)))
    quiet.write_text(text(flat(0.1)))
    yield printed(name, "--no-such-option")
    match name:
        case "plan":
            yield printed(name, *MODEL, *WHOLE, "--parameters", "8B")
            yield printed(name, *MODEL, *WHOLE, "--parameters", "80B")
            yield printed(name, *MODEL)
            (folder / "engine.log").write_text(VLLM_0_19)
            yield printed(name, *MODEL, *WHOLE, "--log", str(folder / "engine.log"))
            day = folder / "day.jsonl"
            day.write_text(advise_traces.text(advise_traces.name_model(advise_traces.healthy(1))))
            yield printed(name, "--trace", str(day))
            yield printed(name, *MODEL, "--trace", str(day))
        case "check":
            yield printed(name, "--trace", str(trace), "--baseline", str(quiet), *LIMITS, *BUDGET)
            yield printed(name, "--trace", str(quiet), *LIMITS)
            (folder / "engine.log").write_text(VLLM_0_19)
            yield printed(name, "--log", str(folder / "engine.log"), str(folder / "engine.log"))
        case "replay" | "advise":
            if name == "advise":
                (folder / "engine.log").write_text(VLLM_0_19 + DEATH)
                yield printed(name, str(folder / "engine.log"))
            yield printed(name, str(trace))
            yield printed(name, str(quiet))
        case "postmortem":
            (folder / "engine.log").write_text(VLLM_0_19 + DEATH)
            yield printed(name, str(write(folder, scenes.scene(scenes.leak, 1))), "--log", str(folder / "engine.log"))
            yield printed(name, str(quiet))
        case "watch":
            with sidecar() as url:
                yield printed(name, url) | {"data": {}}  # docs/snapshot.schema.json has its shape
        case "probe":
            yield printed(name, "install", str(folder / "probe"))
            processes = [PROCESS | {"note": "short"} | RECORDED, PROCESS | UNRECORDED | {"problem": "no answer"}]
            recorded = {
                "folder": "f",
                "seconds": 2.0,
                "processes": processes,
                "no_native": "perf is not installed here",
            }
            yield json.loads(json.dumps(report_recorded(recorded).build_envelope(name)))
            snapshot_report = {
                "folder": "f",
                "snapshots": [SNAPSHOT, SNAPSHOT | {"file": None, "problem": "no answer"}],
            }
            yield json.loads(json.dumps(report_taken(snapshot_report).build_envelope(name)))
            (folder / "oom.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
            yield printed(name, "snapshot", str(folder / "oom.pickle"))
        case "doctor":
            yield printed(name, "--engine-url", NOBODY)
        case "smoke":
            yield printed(name, "--engine-url", NOBODY, "--deadline", "0.1s")
        case "preflight":
            yield json.loads(json.dumps(report_clearance(looking.report()).build_envelope(name)))
            yield printed(name, "--engine-url", NOBODY)
        case "load":
            good, bad = loads.report(loads.GOOD_STEP), loads.report(loads.step({Outcome.FAILED: 3}, error_text="500"))
            yield from (json.loads(json.dumps(load_report.build_envelope(name))) for load_report in (good, bad))
        case _:
            raise AssertionError(f"the schema of {name} is not tested")


@pytest.mark.parametrize("name", [name for name in COMMANDS if find_command(name).has_report])
def test_what_a_command_prints_is_what_its_schema_promises(
    name: str, tmp_path: Path, preflight: Preflight, request: pytest.FixtureRequest
) -> None:
    documents = list(list_objects(name, tmp_path, preflight))
    file = FOLDER / f"{name}-1.json"
    if request.config.getoption("--update-golden"):
        data = [document["data"] for document in documents if document["data"]]
        file.write_text(write_schema(name, data))

    schema = json.loads(file.read_text())
    assert schema["$id"] == documents[0]["schema"]
    for document in documents:
        jsonschema.validate(document, schema)
        assert document["command"] == name
        assert (document["verdict"] == "good") <= (document["status"] == 0)
