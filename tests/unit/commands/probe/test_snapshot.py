"""`probe snapshot`: what the probes of a vLLM write on request, and what a file says without torch."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any, Final

import pytest

from tests.command import read_data, run_command
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.probe import snapshot as asking
from vllm_headroom_tools.probe import snapshot_file
from vllm_headroom_tools.probe.snapshot import report_taken, take_snapshots
from vllm_headroom_tools.probe.snapshot_file import parse_torch_snapshot

Document = dict[str, Any]

TORCH: Final = {"filename": "/v/site-packages/torch/nn/linear.py", "line": 134, "name": "forward"}
MODEL: Final = {"filename": "/v/site-packages/vllm/mo\x1bdel.py", "line": 12, "name": "f"}
EVENTS: Final = [
    {"action": "alloc", "addr": 512, "size": 512, "time_us": 1_760_000_000_000_000},
    {"action": "alloc", "addr": 1024, "size": 8, "time_us": 1_760_000_000_000_000},
    {"action": "alloc", "addr": 1024, "size": 8, "time_us": 1_760_000_007_000_000},
    {"action": "free_requested", "addr": 9, "size": 8},
]
BLOCKS: Final = [
    {"address": 0, "size": 512, "state": "active_allocated", "frames": [TORCH, MODEL]},
    {"address": 512, "size": 512, "state": "active_awaiting_free", "frames": [MODEL]},
    {"address": 1024, "size": 2048, "state": "active_allocated", "frames": [TORCH]},
    {"address": 3072, "size": 4096, "state": "inactive", "frames": [MODEL]},
    {"address": 9000, "size": 8, "state": "active_allocated"},
]
CONTENT: Final[Document] = {"segments": [{"total_size": 10_000, "blocks": BLOCKS}], "device_traces": [EVENTS, []]}


def test_a_file_is_read_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(CONTENT, 4))
    done = run_command("probe", "snapshot", str(file))
    data = read_data(run_command("probe", "snapshot", "--json", str(file)).stdout)

    assert done.stdout.splitlines() == [
        "torch held 3.01 KiB in 4 blocks, of 9.77 KiB reserved. Its history begins 2025-10-09 08:53:20Z.",
        "  2 KiB in 1 block, since 2025-10-09 08:53:27Z: /v/site-packages/torch/nn/linear.py:134",
        "  1 KiB in 2 blocks, from before the history's oldest event: /v/site-packages/vllm/mo?del.py:12",
        "  8 B in 1 block, from before the history's oldest event: allocated before the history began",
    ]
    assert (data["active_bytes"], data["reserved_bytes"], data["blocks"]) == (3080, 10_000, 4)
    assert data["largest"][0] == {
        "file": "/v/site-packages/torch/nn/linear.py",
        "line": 134,
        "bytes": 2048,
        "count": 1,
        "since": 1_760_000_007.0,
    }


class Evil:
    """Runs a command where a pickle of it is read as Python reads it."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def replaced(**changes: Any) -> bytes:
    return pickle.dumps(CONTENT | changes)


def with_block(**changes: Any) -> bytes:
    return replaced(segments=[{"total_size": 1, "blocks": [BLOCKS[0] | changes]}])


HUGE_MEMO: Final = b"\x80\x04]r\xff\xff\xff\xff."
HUGE_BYTES: Final = b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b"."
HUGE_TEXT: Final = b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"."
REPEATED_SEGMENT: Final = [{"total_size": 1, "blocks": BLOCKS * 10}] * 100


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"cos\nsystem\n(S'mkdir evil'\ntR.",
        pickle.dumps(Evil()),
        replaced(segments=[Evil()]),
        pickle.dumps(CONTENT)[:-9],
        pickle.dumps([1, 2]),
        HUGE_MEMO,
        HUGE_BYTES,
        HUGE_TEXT,
        replaced(device_traces=5),
        replaced(device_traces=[[{"action": "alloc", "addr": 1, "time_us": 10**30}]]),
        replaced(device_traces=[[{"action": "alloc", "addr": [], "time_us": 1}]]),
        replaced(segments=REPEATED_SEGMENT),
        with_block(size=-1),
        with_block(size=1e300),
        with_block(size=True),
        with_block(state=5),
        with_block(frames=[{"filename": 3, "line": 1}]),
        with_block(frames=[{"filename": "x", "line": "1"}]),
    ],
)
def test_a_forged_file_is_one_line_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_file, "MAX_FILE_BLOCKS", 1000)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forged").write_bytes(content)
    done = run_command("probe", "snapshot", "forged")

    assert done.returncode == 2
    assert done.stderr.startswith("vllm-headroom probe: forged: no snapshot of torch's memory (")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "evil").exists()


def test_files_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_file, "MAX_OPERATIONS", 1000)
    with pytest.raises(BadInput, match="no snapshot"):
        parse_torch_snapshot(b"\x80\x04(" + b"]" * 2000 + b"l.", "many")
    assert snapshot_file.MAX_FILE_BYTES == 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    done = run_command("probe", "snapshot", str(tmp_path / "large"))
    assert done.stderr == f"vllm-headroom probe: {tmp_path}/large: has more than 64 MiB, which no snapshot has\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two workers that keep torch's history, and a server that does not, write into it."""
    monkeypatch.setattr(asking, "POLL_SECONDS", 0.01)
    directory = tmp_path / "files"
    directory.mkdir()
    for pid, role in ((7, "worker"), (8, "worker"), (9, "api_server")):
        write(directory, pid, role, {} if pid == 9 else {"snapshot": {"history_from": 1000.0}})
    return directory


def write(folder: Path, pid: int, role: str, extra_fields: Document) -> None:
    document = {"headroom_probe": 1, "t": time.time(), "pid": pid, "started_at": 1000.5, "role": role}
    path = folder / f"{pid}-1000.json"
    path.with_suffix(".part").write_text(json.dumps(document | extra_fields))
    path.with_suffix(".part").replace(path)


def answer(folder: Path, pid: int, **changes: Any) -> None:
    """Have a process say that it wrote a snapshot for the request in the folder."""
    request = json.loads((folder / "snapshot.json").read_text())
    assert request["headroom_snapshot"] == 1
    assert request["until"] > time.time()
    holding = {"file": "/site/a.py", "line": 3, "bytes": 8, "count": 2, "since": 1.0}
    requested = {
        "t": time.time(),
        "file": f"/snapshots/requested-rank0-{pid}-1000.pickle",
        "bytes": 9,
        "pause_seconds": 0.25,
        "request": request["id"],
        "largest": [holding],
    }
    write(folder, pid, "worker", {"snapshot": {"history_from": 1000.0, "requested": requested | changes}})


def test_every_process_that_keeps_a_history_is_asked(folder: Path) -> None:
    messages: list[str] = []

    def answer_both(line: str) -> None:
        messages.append(line)
        answer(folder, 7)
        answer(folder, 8, problem="OSError: full", largest=[])

    data = asyncio.run(take_snapshots(folder, answer_both))
    report = report_taken(data)

    assert messages == ["2 processes write a snapshot"]
    assert {snapshot["pid"]: snapshot["problem"] for snapshot in data["snapshots"]} == {7: None, 8: "OSError: full"}
    assert sorted(report.lines) == [
        "  8 B in 2 blocks, since 1970-01-01 00:00:01Z: /site/a.py:3",
        "worker (pid 7) wrote /snapshots/requested-rank0-7-1000.pickle, which stopped it for 0.250 s:",
        "worker (pid 8): OSError: full",
    ]
    assert (report.headline, report.exit_status) == ("1 of 2 processes wrote a snapshot of torch's memory.", 0)
    assert not (folder / "snapshot.json").exists()


def test_a_process_that_does_not_answer_in_time_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SNAPSHOT_SECONDS", 1.0)

    def answer_another_request(_: str) -> None:
        answer(folder, 7)
        answer(folder, 8, request="another")

    data = asyncio.run(take_snapshots(folder, answer_another_request))

    assert {snapshot["pid"]: snapshot["problem"] for snapshot in data["snapshots"]} == {7: None, 8: "no answer"}


def test_without_a_history_there_is_nothing_to_ask(folder: Path) -> None:
    for pid in (7, 8):
        write(folder, pid, "worker", {})
    with pytest.raises(BadInput, match="no process keeps torch's memory history: set HEADROOM_PROBE_SNAPSHOT"):
        asyncio.run(take_snapshots(folder, lambda _: None))
    assert not (folder / "snapshot.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("snapshot",), "HEADROOM_PROBE_DIR: needed for a snapshot, accepts the path of a directory"),
        (
            ("snapshot", "--for", "1m"),
            "needs one of: install FOLDER, record --for DURATION, snapshot [FILE]",
        ),
        (("snapshot", "/nowhere"), "/nowhere: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_reported(words: tuple[str, ...], why: str) -> None:
    done = run_command("probe", *words)

    assert (done.returncode, done.stderr) == (2, f"vllm-headroom probe: {why}\n")
