"""Lines of a trace to snapshots, and what is reported about lines that are none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vllm_headroom.model import EnginePage, EngineProcess, EngineReading, Failure, Gpu, GpuMemory, Snapshot
from vllm_headroom.vocabulary import Attribution, Role, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import parse_snapshot, parse_trace

HEADER = b'{"headroom_trace": 1}\n'
A_GPU = {"gpu": 3, "uuid": "GPU-a", "total": 1000, "used": 900, "reserved": 20, "engine": 800, "other": 50}


def understood(record: dict[str, Any]) -> Snapshot:
    return parse_snapshot({"t": 5, **record})


def gpu(**fields: Any) -> Gpu:
    gpus = understood({"gpus": [fields]}).gpus
    assert not isinstance(gpus, Failure)
    return gpus[0]


def test_a_full_line_is_a_full_snapshot() -> None:
    record = {
        "t": 1_760_000_000.5,
        "gpus": [{**A_GPU, "processes": 2}],
        "engines": [
            {
                "model_name": "m",
                "engine": "1",
                "running": 12,
                "waiting": 0,
                "kv_used_ratio": 0.41,
                "kv_capacity_tokens": 1000000,
                "finished_total": 10234,
                "preemptions_total": 0,
                "prefix_queries_total": 1,
                "prefix_hits_total": 0,
                "awake": True,
                "started_at": 1_759_990_000.0,
            }
        ],
        "processes": [{"role": "engine_core", "rss": 3_000_000_000, "started_at": 1_759_990_000.0}],
    }

    (snapshot,) = parse_trace([HEADER, json.dumps(record).encode()])

    assert (snapshot.time_seconds, snapshot.monotonic_seconds) == (1_760_000_000.5, 1_760_000_000.5)
    assert not isinstance(snapshot.gpus, Failure)
    (parsed_gpu,) = snapshot.gpus
    assert (parsed_gpu.reading.index, parsed_gpu.reading.uuid, parsed_gpu.attribution) == (
        3,
        "GPU-a",
        Attribution.PROCESS,
    )
    assert parsed_gpu.reading.memory == GpuMemory(total_bytes=1000, used_bytes=900, free_bytes=80, reserved_bytes=20)
    assert (parsed_gpu.engine_bytes, parsed_gpu.other_bytes, parsed_gpu.held_bytes, parsed_gpu.process_count) == (
        800,
        50,
        800,
        2,
    )
    engine = EngineReading(
        model_name="m",
        engine="1",
        running=12.0,
        waiting=0.0,
        kv_used_ratio=0.41,
        kv_capacity_tokens=1e6,
        finished_total=10234.0,
        preemptions_total=0.0,
        prefix_queries_total=1.0,
        prefix_hits_total=0.0,
        awake=True,
        started_at_seconds=1_759_990_000.0,
    )
    assert snapshot.engines == EnginePage(profile="vllm", engines=(engine,), inputs=())
    core = EngineProcess(pid=0, role=Role.ENGINE_CORE, rss_bytes=3_000_000_000, started_at_seconds=1_759_990_000.0)
    assert snapshot.processes == (core,)


@pytest.mark.parametrize("record", [{}, {"gpus": None, "engines": None, "processes": None}])
def test_a_side_that_is_absent_or_null_has_failed(record: dict[str, Any]) -> None:
    snapshot = understood(record)

    sides = (snapshot.gpus, snapshot.engines, snapshot.processes)
    assert [side.source if isinstance(side, Failure) else None for side in sides] == [
        Source.NVML,
        Source.ENGINE,
        Source.PROCESS,
    ]


def test_a_side_with_nothing_in_it_has_not_failed() -> None:
    snapshot = understood({"gpus": [], "engines": [], "processes": []})

    assert (snapshot.gpus, snapshot.processes) == ((), ())
    assert snapshot.engines == EnginePage(profile="vllm", engines=(), inputs=())


def test_without_attribution_the_engine_holds_what_is_used_and_not_known_to_be_others() -> None:
    assert gpu(used=900).held_bytes == 900
    assert gpu(used=900, other=100).held_bytes == 800
    assert gpu(used=900, engine=0).held_bytes == 0
    assert gpu(used=900).attribution is Attribution.UUID
    assert gpu(uuid="GPU-a").held_bytes is None


def test_what_is_unknown_is_null_or_absent_and_a_name_comes_from_the_place() -> None:
    gpu_sample = gpu(gpu=None, uuid=None, total=None, used=900, engine=None)

    assert (gpu_sample.reading.index, gpu_sample.reading.uuid, gpu_sample.reading.memory) == (0, "index 0", None)
    engines = understood({"engines": [{}, {"model_name": None}]}).engines
    assert isinstance(engines, EnginePage)
    assert [(engine.model_name, engine.engine, engine.running) for engine in engines.engines] == [
        ("unknown", "0", None),
        ("unknown", "1", None),
    ]


def test_a_process_whose_memory_is_unknown_costs_the_sum_and_so_the_side() -> None:
    processes = [{"role": "worker", "rss": 5}, {"role": "worker"}]

    assert isinstance(understood({"processes": processes}).processes, Failure)
    assert understood({"processes": [{"rss": 5}]}).processes == (
        EngineProcess(pid=0, role=Role.OTHER, rss_bytes=5, started_at_seconds=0.0),
    )


def test_fields_of_later_versions_are_passed_over() -> None:
    assert understood({"gpus": [{**A_GPU, "colour": "blue"}], "weather": []})


def test_time_may_go_back() -> None:
    snapshots = list(parse_trace([HEADER, b'{"t": 20}\n', b'{"t": 10}\n']))

    assert [snapshot.time_seconds for snapshot in snapshots] == [20.0, 10.0]


def test_rotated_traces_can_be_put_together() -> None:
    snapshots = list(parse_trace([HEADER, b'{"t": 1}\n', b"\n", HEADER, b'{"t": 2}']))

    assert [snapshot.time_seconds for snapshot in snapshots] == [1.0, 2.0]


def test_a_trace_may_have_no_samples() -> None:
    assert list(parse_trace([HEADER])) == []


NO_TRACE = 'no trace of this version, whose first line is {"headroom_trace": 1}'


@pytest.mark.parametrize(
    "lines", [[], [b"\n"], [b'{"t": 1}'], [b'{"headroom_trace": 2}'], [b"\x89PNG\r\n"], [b"[1]"], [b"{"]]
)
def test_the_first_line_says_that_it_is_a_trace(lines: list[bytes]) -> None:
    with pytest.raises(BadInput, match=re.escape(f"line 1: {NO_TRACE}")):
        list(parse_trace(lines))


def test_a_later_header_of_another_version_is_refused() -> None:
    with pytest.raises(BadInput, match=re.escape(f"line 2: {NO_TRACE}")):
        list(parse_trace([HEADER, b'{"headroom_trace": 2}']))


BYTES = "a number, 0 or more"
TEXT = "text without control characters"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"t": 1', "not JSON: Expecting ',' delimiter at column 8"),
        ("\x00\x00", "not JSON: Expecting value at column 1"),
        ('{"t": NaN}', "not JSON: NaN is no number"),
        ("[1, 2]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 100_000, "not JSON of a trace: nested too deep"),
        ("{}", "t: got nothing, accepts seconds since the epoch"),
        ('{"t": null}', "t: got nothing, accepts seconds since the epoch"),
        ('{"t": "1"}', "t: got '1', accepts seconds since the epoch"),
        ('{"t": true}', "t: got True, accepts seconds since the epoch"),
        ('{"t": -1}', "t: got -1, accepts seconds since the epoch"),
        ('{"t": 1e999}', "t: got inf, accepts seconds since the epoch"),
        ('{"t": 1760000000000}', "t: got 1760000000000, accepts seconds since the epoch"),
        ('{"t": 1, "gpus": {}}', "gpus: got {}, accepts a list or null"),
        ('{"t": 1, "gpus": [3]}', "gpus[0]: got 3, accepts an object"),
        ('{"t": 1, "gpus": [{}, {"used": -5}]}', f"gpus[1].used: got -5, accepts {BYTES}"),
        ('{"t": 1, "gpus": [{"used": "9"}]}', f"gpus[0].used: got '9', accepts {BYTES}"),
        ('{"t": 1, "gpus": [{"total": 1e17}]}', f"gpus[0].total: got 1e+17, accepts {BYTES}"),
        ('{"t": 1, "gpus": [{"engine": false}]}', f"gpus[0].engine: got False, accepts {BYTES}"),
        ('{"t": 1, "gpus": [{"gpu": "0"}]}', f"gpus[0].gpu: got '0', accepts {BYTES}"),
        ('{"t": 1, "gpus": [{"uuid": 7}]}', f"gpus[0].uuid: got 7, accepts {TEXT}"),
        ('{"t": 1, "gpus": [{"uuid": "\\u001b[2J"}]}', f"gpus[0].uuid: got '\\x1b[2J', accepts {TEXT}"),
        ('{"t": 1, "gpus": [{"uuid": "\\ud800"}]}', f"gpus[0].uuid: got '\\ud800', accepts {TEXT}"),
        ('{"t": 1, "gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-a"}]}', "gpus: the same GPU twice"),
        ('{"t": 1, "engines": [{"running": []}]}', f"engines[0].running: got [], accepts {BYTES}"),
        ('{"t": 1, "engines": [{"awake": 1}]}', "engines[0].awake: got 1, accepts true or false"),
        (
            '{"t": 1, "processes": [{"role": "cook"}]}',
            "processes[0].role: got 'cook', accepts api_server, engine_core, worker, other",
        ),
        ('{"t": 1, "processes": [{"rss": -1}]}', f"processes[0].rss: got -1, accepts {BYTES}"),
        (f'{{"t": "{"x" * 99}"}}', f"t: got '{'x' * 59}..., accepts seconds since the epoch"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_ends_the_trace(line: str, problem: str) -> None:
    trace = parse_trace([HEADER, b'{"t": 1}\n', line.encode() + b"\n", b'{"t": 2}\n'])

    assert next(trace).time_seconds == 1.0
    with pytest.raises(BadInput) as error:
        next(trace)
    assert str(error.value) == f"line 3: {problem}"
    assert list(trace) == []


def test_a_line_that_is_no_utf_8_is_named() -> None:
    with pytest.raises(BadInput, match=r"^line 2: not UTF-8$"):
        list(parse_trace([HEADER, b'{"t": "\xff"}\n']))


def test_a_number_of_ten_thousand_digits_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^line 2: not JSON: "):
        list(parse_trace([HEADER, b'{"t": ' + b"9" * 10_000 + b"}\n"]))
