"""A file of the probe: what it says, and what is refused of one that a hostile engine wrote."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.model import (
    AllocatorHistory,
    AllocatorReading,
    AllocatorSnapshot,
    Cgroup,
    HostReading,
    LineHolding,
    OomRecord,
    PeakReadings,
    ProbedProcess,
    SchedulerReading,
    Shm,
    SizePeak,
    StepAtError,
    StepFacts,
    WorkerMeasurements,
    WorkPeak,
    WorkPeaks,
)
from vllm_headroom.parse.peaks import MOST_SIZES
from vllm_headroom.parse.probe import MOST_DEVICES, parse_probe
from vllm_headroom.vocabulary import Role, Work

WHOLE: Final[dict[str, Any]] = {
    "headroom_probe": 1,
    "sequence": 12,
    "t": 1760000000.5,
    "interval_seconds": 5.0,
    "pid": 7,
    "started_at": 1759990000.12,
    "boot_id": "a-boot",
    "role": "worker",
    "process_name": "VllmWorker-0",
    "stopped": None,
    "rank": 0,
    "local_rank": 0,
    "data_parallel_rank": 1,
    "vllm": "0.32.0",
    "torch": "2.14.0",
    "cost": {"last_seconds": 0.0004, "longest_seconds": 0.002, "cpu_seconds": 0.12},
    "devices": [
        {"uuid": "GPU-a", "total": 80, "allocated": 1, "reserved": 2, "inactive_split": 3, "retries": 4, "ooms": 5}
    ],
    "parts": {
        "weights": 1,
        "kv_cache": 2,
        "cuda_graphs": 3,
        "activation_peak": 4,
        "requested": 5,
        "asleep": False,
        "pool": {"weights": 1, "kv_cache": 2, "runtime": 3, "workspace": 4},
    },
    "scheduler": {
        "kv_blocks_total": 1000,
        "kv_blocks_free": 900,
        "kv_blocks_live": 60,
        "kv_tokens_live": 799,
        "block_size": 16,
        "running": 3,
        "waiting": 0,
        "steps_total": 12345,
        "max_num_seqs": 256,
        "max_model_len": 4096,
        "bytes_per_kv_token": 131072,
    },
    "pinned": 77,
    "host": {"cgroup": {"used": 1, "file": 2, "limit": 3, "oom_kills": 0}, "shm": {"used": 1, "limit": 2}},
    "oom": {"t": 1.5, "uuid": "GPU-a", "asked": 1, "free": 2, "total": 3, "allocated": 4, "reserved": 5, "running": 6},
    "snapshot": {
        "history_from": 1.0,
        "oom": {
            "t": 1.5,
            "file": "/snap/oom-rank0-7-1.pickle",
            "bytes": 9,
            "pause_seconds": 0.1,
            "request": None,
            "problem": None,
            "largest": [
                {"file": "/site/a.py", "line": 3, "bytes": 8, "count": 2, "since": 1.2},
                {"file": None, "line": None, "bytes": 4, "count": 1, "since": None},
            ],
        },
        "requested": None,
    },
}


def parsed(**changed: Any) -> tuple[ProbedProcess, str | None] | str:
    return parse_probe(json.dumps(WHOLE | changed).encode())


def test_a_whole_file_is_understood() -> None:
    assert parsed() == (
        ProbedProcess(
            pid=7,
            started_at_seconds=1759990000.12,
            written_at_seconds=1760000000.5,
            interval_seconds=5.0,
            role=Role.WORKER,
            data_parallel_rank=1,
            vllm_version="0.32.0",
            devices=(
                AllocatorReading(
                    uuid="GPU-a",
                    total_bytes=80,
                    allocated_bytes=1,
                    reserved_bytes=2,
                    inactive_split_bytes=3,
                    retries=4,
                    ooms=5,
                ),
            ),
            parts=WorkerMeasurements(
                weights_bytes=1,
                kv_cache_bytes=2,
                cuda_graphs_bytes=3,
                activation_peak_bytes=4,
                requested_bytes=5,
                asleep=False,
                pool=WorkerMeasurements(weights_bytes=1, kv_cache_bytes=2),
            ),
            scheduler=SchedulerReading(
                steps_total=12345, max_num_seqs=256, kv_stranded_ratio=1 - 960 / 999, kv_token_ratio=799 / (999 * 16)
            ),
            host=HostReading(
                cgroup=Cgroup(identity="probe", used_bytes=1, cache_bytes=2, limit_bytes=3, oom_kills=0),
                shm=Shm(total_bytes=2, free_bytes=1),
            ),
            pinned_bytes=77,
            oom=OomRecord(
                at_seconds=1.5,
                uuid="GPU-a",
                asked_bytes=1,
                free_bytes=2,
                allocated_bytes=4,
                reserved_bytes=5,
            ),
            history=AllocatorHistory(
                from_seconds=1.0,
                oom=AllocatorSnapshot(
                    at_seconds=1.5,
                    file="/snap/oom-rank0-7-1.pickle",
                    size_bytes=9,
                    pause_seconds=0.1,
                    largest=(
                        LineHolding(file="/site/a.py", line=3, size_bytes=8, n_blocks=2, since_seconds=1.2),
                        LineHolding(file=None, line=None, size_bytes=4, n_blocks=1),
                    ),
                ),
            ),
        ),
        "a-boot",
    )


@pytest.mark.parametrize("shm", [{"used": 1}, {"limit": 2}], ids=["no limit", "no use"])
def test_a_half_known_host_is_not_known(shm: dict[str, int]) -> None:
    parsed = parse_probe(json.dumps(WHOLE | {"host": {"cgroup": {"limit": 3}, "shm": shm}}).encode())

    assert not isinstance(parsed, str)
    assert parsed[0].host == HostReading()


def test_all_but_the_first_block_may_be_missing() -> None:
    required_fields = {name: WHOLE[name] for name in ("headroom_probe", "t", "pid", "started_at")}

    assert parse_probe(json.dumps(required_fields).encode()) == (
        ProbedProcess(
            pid=7,
            started_at_seconds=1759990000.12,
            written_at_seconds=1760000000.5,
            interval_seconds=5.0,
            role=Role.OTHER,
        ),
        None,
    )


STEP: Final = {"t": 1760000000.0, "requests": 2, "tokens": 70, "prompt_tokens": 69, "logprobs_tokens": 60}
PEAKS: Final[dict[str, Any]] = {
    "steps": 9,
    "stopped": None,
    "limits": {"batch_tokens": 2048, "model_tokens": 4096, "requests": None},
    "resting": {"allocated": 5, "reserved": 7, "inactive_split": 1},
    "kinds": {
        "prompt_logprobs": {"steps": 4, "sizes": [[60, 1000, 4]], "highest": {"bytes": 1000, "size": 60, **STEP}},
        "of the future": {"sizes": 7},
    },
}


def test_peaks_are_understood() -> None:
    parsed_text = parsed(peaks=PEAKS, oom=WHOLE["oom"] | {"step": {"work": "sampling", **STEP}})

    assert not isinstance(parsed_text, str)
    step = StepFacts(at_seconds=1760000000.0, requests=2, tokens=70, prompt_tokens=69, logprobs_tokens=60)
    assert parsed_text[0].oom is not None
    assert parsed_text[0].oom.step == StepAtError(work=Work.SAMPLING, step=step)
    assert parsed_text[0].peaks == PeakReadings(
        works=(
            WorkPeaks(
                work=Work.PROMPT_LOGPROBS,
                sizes=(SizePeak(size=60, transient_bytes=1000, steps=4),),
                highest=WorkPeak(transient_bytes=1000, size=60, step=step),
            ),
        ),
        resting_allocated_bytes=5,
        resting_reserved_bytes=7,
        resting_split_bytes=1,
        batch_tokens=2048,
        model_tokens=4096,
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "got [], accepts an object or null"),
        ({"sizes": [[1, 2, 3]] * (MOST_SIZES + 1)}, "sizes: got "),
        ({"sizes": [[1, 2]]}, "sizes[0]: got [1, 2], accepts a size, its bytes and its steps"),
        ({"sizes": [[1, -2, 3]]}, "sizes[0][1]: got -2, accepts a number, 0 or more"),
        ({"sizes": [[1, None, 3]]}, "sizes[0][1]: got nothing, accepts a number, 0 or more"),
        ({"recent": {"bytes": 1, "size": 2}}, "recent.t: got nothing, accepts a number, 0 or more"),
        ({"highest": {"bytes": True, "size": 2, "t": 1}}, "highest.bytes: got True, accepts a number, 0 or more"),
    ],
)
def test_wrong_peaks_and_nothing_is_believed(table: object, says: str) -> None:
    parsed_text = parsed(peaks=PEAKS | {"kinds": {"decode": table}})

    assert isinstance(parsed_text, str)
    assert parsed_text.removeprefix("peaks.kinds.decode").removeprefix(".").removeprefix(": ").startswith(says)


def test_what_a_later_probe_adds_is_passed_over() -> None:
    assert parsed(colour="red", scheduler=WHOLE["scheduler"] | {"mood": [1]}) == parsed()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"headroom_probe": 2}, "no file of a probe of version 1"),
        ({"pid": None}, "pid: got nothing, accepts a number, 0 or more"),
        ({"t": "now"}, "t: got 'now', accepts a number, 0 or more"),
        ({"started_at": True}, "started_at: got True, accepts a number, 0 or more"),
        ({"devices": {}}, "devices: got {}, accepts a list or null"),
        ({"devices": [1]}, "devices[0]: got 1, accepts an object"),
        ({"devices": [{"allocated": 1}]}, "devices[0].uuid: got nothing, accepts the UUID of a device"),
        ({"devices": [{"uuid": "a", "allocated": -1}]}, "devices[0].allocated: got -1, accepts a number, 0 or more"),
        ({"devices": [{"uuid": "a", "retries": 2**53 + 1}]}, "devices[0].retries: got 9007199254740993, accepts"),
        ({"devices": [{"uuid": "GPU\x1b[2J"}]}, "devices[0].uuid: got 'GPU\\x1b[2J', accepts text without control"),
        ({"devices": [{"uuid": "a"}] * (MOST_DEVICES + 1)}, "devices: got 65, accepts at most 64 entries"),
        ({"parts": []}, "parts: got [], accepts an object or null"),
        ({"parts": {"weights": "1"}}, "parts.weights: got '1', accepts a number, 0 or more"),
        ({"parts": {"asleep": 1}}, "parts.asleep: got 1, accepts true or false"),
        ({"parts": {"pool": {"weights": []}}}, "parts.pool.weights: got [], accepts a number, 0 or more"),
        ({"scheduler": {"steps_total": {}}}, "scheduler.steps_total: got {}, accepts a number, 0 or more"),
        ({"host": {"cgroup": 1}}, "host.cgroup: got 1, accepts an object or null"),
        ({"oom": {}}, "oom.t: got nothing, accepts a number, 0 or more"),
        ({"stopped": ["x"]}, "stopped: got ['x'], accepts text without control characters"),
    ],
)
def test_one_wrong_field_and_nothing_is_believed(changed: dict[str, Any], says: str) -> None:
    parsed_text = parsed(**changed)

    assert isinstance(parsed_text, str)
    assert parsed_text.startswith(says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON: Expecting value"),
        (b"\xff\xfe\xff", "not JSON: "),
        (b"[1]", "no file of a probe"),
        (b'{"headroom_probe": 1, "pid": NaN}', "not JSON: NaN is no number"),
        (b'{"headroom_probe": 1, "pid": Infinity}', "not JSON: Infinity is no number"),
        (b'{"headroom_probe": 1, "pid": 1e999}', "pid: got inf, accepts"),
        (b'{"headroom_probe": 1, "pid": ' + b"9" * 4000 + b"}", "pid: got 9"),
        (b'{"headroom_probe": 1, "pid": ' + b"9" * 5000 + b"}", "not JSON: "),
        (b"[" * 16_000, "not JSON of a probe: nested too deep"),
    ],
)
def test_content_that_is_no_probes_is_distinguished_from_it(content: bytes, says: str) -> None:
    parsed_file = parse_probe(content)

    assert isinstance(parsed_file, str)
    assert parsed_file.startswith(says)


def test_an_error_that_is_later_than_its_file_is_not_believed() -> None:
    earlier, later = parsed(oom={"t": WHOLE["t"]}), parsed(oom={"t": WHOLE["t"] + 0.1})

    assert not isinstance(earlier, str)
    assert not isinstance(later, str)
    assert (earlier[0].oom, later[0].oom) == (OomRecord(at_seconds=WHOLE["t"]), None)


def test_long_text_is_cut() -> None:
    parsed_text = parsed(stopped="x" * 10_000)

    assert not isinstance(parsed_text, str)
    assert parsed_text[0].stopped == "x" * 200


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5), st.data()
)
def test_no_value_anywhere_raises(value: Any, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([None, "parts", "scheduler", "host", "oom"]))
    inner: dict[str, Any] = WHOLE if block is None else WHOLE[block]
    changed = inner | {data.draw(st.sampled_from(sorted(inner))): value}

    parse_probe(json.dumps(changed if block is None else WHOLE | {block: changed}).encode())
