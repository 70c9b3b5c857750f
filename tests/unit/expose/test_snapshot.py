"""What the page shows, for programs."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from msgspec.structs import replace

from tests.assets.console import ROOT
from tests.samples import A_GPU, failure, snapshot
from tests.unit.expose.views import day, view
from vllm_headroom import catalog
from vllm_headroom.expose.snapshot import build_document, respond_snapshot
from vllm_headroom.expose.view import History, LastIncident, View
from vllm_headroom.model import Sample
from vllm_headroom.vocabulary import LeakState, Source


def test_what_is_not_known_is_null_and_never_0() -> None:
    (gpu,) = build_document(view([Sample(catalog.GPU_UP, A_GPU, 1.0)]))["gpus"]

    assert (gpu["gpu"], gpu["uuid"], gpu["up"]) == (*A_GPU, 1.0)
    assert gpu["time_to_oom_seconds"] is None
    assert gpu["memory_held_bytes"] is None


def test_states_labels_and_families_have_their_forms() -> None:
    shown = build_document(
        view(
            [
                Sample(catalog.LEAK_STATE, (*A_GPU, LeakState.STABLE), 1.0),
                Sample(catalog.LEAK_STATE, (*A_GPU, LeakState.LEAKING), 0.0),
                Sample(catalog.GPU_MEMORY_HELD, (*A_GPU, "engine"), 5.0),
                Sample(catalog.GPU_INFO, (*A_GPU, "H100", "process"), 1.0),
                Sample(catalog.ENGINE_STATE, ("serving",), 1.0),
                Sample(catalog.HOST_LEAK_STATE, ("worker", "growing"), 1.0),
                Sample(catalog.ENGINE_RUNNING, ("m", "0"), 3.0),
            ]
        )
    )

    (gpu,), (engine,) = shown["gpus"], shown["engines"]
    assert (gpu["leak_state"], gpu["memory_held_bytes"]) == ("stable", {"engine": 5.0})
    assert gpu["info"] == {"name": "H100", "attribution": "process"}
    assert (shown["engine_state"], shown["host_leak_state"]) == ("serving", {"worker": "growing"})
    assert (engine["model_name"], engine["requests_running"]) == ("m", 3.0)


def test_a_failure_is_among_the_problems() -> None:
    shown = build_document(view(at=snapshot(engines=failure(Source.ENGINE))))

    assert shown["problems"] == [{"source": "engine", "reason": "unreachable", "message": "it failed"}]


def test_the_last_incident_is_reported_with_its_command() -> None:
    last_incident = LastIncident(seconds=5.0, kind="stalled", reason=None, sentence=None, file="/state/a.jsonl")
    schema: dict[str, Any] = json.loads((ROOT / "docs" / "snapshot.schema.json").read_text())
    shown = build_document(replace(view(), last_incident=last_incident))

    assert shown["last_incident"] == {
        "t": 5.0,
        "what": "stalled",
        "reason": None,
        "sentence": None,
        "file": "/state/a.jsonl",
        "command": "vllm-headroom postmortem /state/a.jsonl",
    }
    jsonschema.validate(json.loads(json.dumps(shown)), schema)
    assert build_document(view())["last_incident"] is None


def test_before_the_first_sample_all_is_unknown() -> None:
    shown = build_document(View(version="1", interval_seconds=5.0, history=History()))

    assert (shown["t"], shown["age_seconds"], shown["gpus"], shown["level"]) == (None, None, [], "unknown")


def test_the_documented_schema_is_the_documents() -> None:
    schema: dict[str, Any] = json.loads((ROOT / "docs" / "snapshot.schema.json").read_text())
    shown = json.loads(respond_snapshot(day(gpus=2, leaking=frozenset({0}))).body)

    jsonschema.validate(shown, schema)
    assert set(schema["properties"]) == set(shown)
    assert set(schema["properties"]["gpus"]["items"]["properties"]) == set(shown["gpus"][0])
