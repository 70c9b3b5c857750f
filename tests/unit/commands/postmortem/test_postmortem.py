"""The command: one page, one object, one file of HTML, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data, run_command
from tests.unit.commands.postmortem import scenes
from tests.unit.commands.postmortem.scenes import Scene
from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, locate_incident, write_incident
from vllm_headroom_tools.advise.history import TraceHistory
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.cli import execute
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.postmortem.command import COMMAND
from vllm_headroom_tools.trace import parse_snapshot, read_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def called(*words: object) -> tuple[int, str, str]:
        status = execute(COMMAND, "postmortem", [str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return called


def write(folder: Path, scene: Scene) -> Path:
    """Set a scene aside, as the daemon does."""
    with (folder / FLIGHT).open("wb") as stream:
        stream.write(encode_line(HEADER))
        stream.writelines(map(encode_line, scene.samples))
    assert scene.header is not None
    write_incident(folder, scene.header["t"], scene.header)
    return locate_incident(folder, scene.header["t"])


@pytest.fixture
def leaked(tmp_path: Path) -> Path:
    scene = scenes.scene(scenes.leak, 1)
    assert scene.header is not None
    scene.header |= {
        "version": "1.2.3",
        "log": ["a <line> of the log https://example.org/", "\x1b[31mred"],
        "events": [{"what": "ended"}],
    }
    scene.header["xids"] = [{"t": scene.header["t"] - 1, "uuid": "GPU-a", "xid": 79}]
    scene.header["before"]["verdicts"] = [{"sentence": "GPU 0 leaks."}]
    holders = ((7, 5), (9, 73 * 2**30), (10, None))
    scene.header["before"]["holders"] = [{"uuid": "GPU-a", "pid": pid, "used": used} for pid, used in holders]
    torch = {"uuid": "GPU-a", "allocated_bytes": 3, "reserved_bytes": 4}
    scene.header["before"]["probe"] = [{"pid": 8, "role": "worker", "devices": [torch]}, {"devices": 1}]
    kinds = {"anonymous mmap": 3 * 2**30, "libucs.so.0": 2**20, "\x1b[2J": 5, "less": -5, "more": 1e30}
    grown = {"pid": 8, "role": "worker", "since": 100.0, "t": 4000.0, "kinds": kinds}
    scene.header["before"]["mappings"] = [grown, {"pid": 9, "kinds": 3}, {"role": "worker"}]
    return write(tmp_path, scene)


def test_memory_that_was_full_only_between_two_samples_is_found(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    ends = scene.header["t"]
    used = [[ends - 4.0, scenes.TOTAL - scenes.RESERVED - 20 * scenes.MIB], ["?", 1], [ends - 3.0, 5]]

    def cause() -> str:
        return str(read_data(run(write(tmp_path, scene), "--json")[1])["cause"])

    assert cause() == "crash"
    scene.header["before"] = {"used": {"GPU-a": used}}
    assert cause() == "out_of_memory_burst"
    run(write(tmp_path, scene), "--html", tmp_path / "page.html")
    assert "Free memory of GPU 0 in the last minutes, second by second" in (tmp_path / "page.html").read_text()


def test_one_page_says_what_it_was_how_sure_and_what_to_do(run: Run, leaked: Path) -> None:
    status, out, err = run(leaked)

    assert (status, err) == (0, "")
    assert re.match(r"2025-10-09 \d\d:\d\d:\d\dZ: Out of GPU memory by a leak: .* \(sure\)\n", out)
    for part in (
        "the leak detector reported leaking",
        "The sidecar's verdicts then\n  GPU 0 leaks.",
        "Timeline",
        "the driver reported XID 79 on GPU-a",
        "  the engine exited",
        "Numbers for a bug report",
        "GPU-a pid 7 5 B",
        "GPU-a pid 9 73 GiB",
        "GPU-a pid 10 an amount not known",
        "GPU-a pid 8 worker: allocated 3 B, reserved 4 B",
        "worker pid 8 in 1 h 5 min: 3 GiB in anonymous mmap, 1 MiB in libucs.so.0, 5 B in \\x1b[2J",
        "process pid 9: no kind of mapping",
        "80 GiB in all",
        "GiB left at first",
        "the record begins: the engine serves",
        "  this run       began 2025-10-09 ",
        "https://github.com/vllm-project/vllm/issues",
        "a <line> of the log",
    ):
        assert part in out, part
    assert len(out.splitlines()) <= 60
    assert out.endswith("\n\nSituation\n  leaking\n"), "the last line"
    assert "\x1b" not in out


def test_the_object_has_the_same(run: Run, leaked: Path) -> None:
    status, out, _ = run(leaked, "--json")
    data = read_data(out)

    assert status == 0
    assert (data["cause"], data["sure"], data["what"]) == ("out_of_memory_leak", "sure", "ended")
    assert data["situation"] == "leaking"
    assert data["known"]["version"] == "1.2.3"
    assert data["also"] == []
    assert [moment["t"] for moment in data["timeline"]] == sorted(moment["t"] for moment in data["timeline"])
    assert data["numbers"]["GPU 0"].endswith("leak detector: leaking")


def test_the_page_is_one_file_that_loads_nothing_and_draws_the_curves(run: Run, leaked: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    assert run(leaked, "--html", page)[0] == 0

    text = page.read_text()
    assert text.count("<svg") == 2
    assert re.findall(r"<i>(\d)\.?\d* GiB</i>", text), "the card, empty after the end, sets no scale"
    assert 'class="line"' in text
    assert "a &lt;line&gt; of the log https://example.org/</li>" in text
    assert '<b>then</b> Report it to vLLM, with the figures above: <a href="https://github.com/vllm-project' in text
    assert "\x1b" not in text
    assert not re.search(r"<script|<link|src=|url\(", text)


def test_a_letter_that_no_file_can_hold_costs_nothing_else(run: Run, tmp_path: Path) -> None:
    """The name of a file may be no UTF-8, and is in the log as it is."""
    scene, page = scenes.scene(scenes.crash, 1), tmp_path / "why.html"
    assert scene.header is not None
    scene.header["log"] = ["cannot write: file=/state-\udcff"]
    status, _, err = run(write(tmp_path, scene), "--html", page)

    assert (status, err) == (0, "")
    assert "file=/state-" in page.read_text()


def test_of_a_folder_it_is_the_newest_incident_and_the_state_directory_is_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, scenes.scene(scenes.leak, 1))
    killed = scenes.scene(scenes.killed, 1)
    assert killed.header is not None
    for sample in killed.samples:
        sample["t"] += 90_000.0
    killed.header["t"] += 90_000.0
    newest = write(tmp_path, killed)
    monkeypatch.setenv("HEADROOM_STATE_DIR", str(tmp_path))

    reports = [read_data(run(*words, "--json")[1]) for words in ((tmp_path,), (tmp_path / INCIDENTS,), ())]

    assert {report["file"] for report in reports} == {str(newest)}
    assert {report["cause"] for report in reports} == {"killed_by_kernel"}


def test_a_trace_without_an_end_is_an_answer(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(encode_line(HEADER) + b"".join(map(encode_line, scenes.scene(scenes.crash, 2).samples[:20])))

    status, out, _ = run(trace)

    assert status == 0
    assert out.startswith("There is no exit of an engine here")


def test_an_end_that_only_the_header_tells_of_is_not_denied(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(encode_line({**HEADER, "incident": {"t": 2_000_000_000.0, "what": "ended"}}))

    assert "The cause of the exit is not known." in run(trace)[1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"dear diary\n", "line 1: no trace of this version"),
        (encode_line(HEADER), "file: has no samples"),
        (b'{"headroom_trace":1,"incident":{"what":"ended"}}\n', "has a time `t`"),
        (b'{"headroom_trace":1,"incident":{"t":1,"what":["ended"]}}\n', "has a time `t`"),
        (b'{"headroom_trace":1,"incident":{"t":1,"what":"ended"}}\n{"t":-1}\n', "line 2: t: got -1"),
    ],
)
def test_a_bad_file_ends_with_status_2_and_one_line(run: Run, tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)

    status, out, err = run(file)

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert problem in err


def test_places_without_an_incident_are_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_STATE_DIR", raising=False)
    outcomes = [run(), run(tmp_path), run(tmp_path / "gone"), run(tmp_path, "--html", tmp_path)]

    assert [status for status, _, _ in outcomes] == [2, 2, 2, 2]
    assert "needs a FILE or a FOLDER" in outcomes[0][2]
    assert "has no incident" in outcomes[1][2]
    assert "No such file" in outcomes[2][2]


def test_a_log_without_a_record_is_left_to_advise(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_STATE_DIR", raising=False)

    assert "; vllm-headroom advise reads a log without a record" in run("--log", tmp_path / "vllm.log")[2]


def test_a_gpu_that_could_not_be_read_any_more_is_what_a_crash_was_of(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    verdict = {"sentence": "GPU 0 cannot be read: the GPU is lost.", "alert": "HeadroomGpuLost"}
    scene.header["before"] = {
        "verdicts": [verdict, {"sentence": "The engine serves.", "alert": None}, {"alert": "HeadroomGpuLost"}]
    }

    _, out, _ = run(write(tmp_path, scene))

    assert "A crash: one of its GPUs could no longer be read." in out
    assert "  seen  GPU 0 cannot be read: the GPU is lost.\n" in out


def test_what_torch_was_refused_is_no_crash_with_memory_at_ease(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    refusal = {"t": scene.header["t"] - 1, "uuid": "GPU-a", "asked": 5, "free": 3}
    scene.header["ooms"] = [refusal, refusal | {"allocated": 60, "reserved": 64}]

    data = read_data(run(write(tmp_path, scene), "--json")[1])

    assert (data["cause"], data["sure"]) == ("out_of_memory_burst", "likely")
    assert data["evidence"][:2] == [
        "torch raised OutOfMemoryError on GPU-a: 5 B asked, 3 B free",
        "torch raised OutOfMemoryError on GPU-a: 5 B asked, 3 B free, 64 B its own, 60 B in use",
    ]


def test_a_full_card_names_the_allocation_that_failed(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.burst, 1)
    assert scene.header is not None
    scene.header["ooms"] = [{"t": scene.header["t"] - 1, "uuid": "GPU-a", "asked": 5, "free": 3}]

    data = read_data(run(write(tmp_path, scene), "--json")[1])

    assert data["sentence"] == "Out of GPU memory in a burst: an allocation of torch failed."
    assert data["evidence"][0] == "torch raised OutOfMemoryError on GPU-a: 5 B asked, 3 B free"


def test_torchs_snapshot_and_what_held_most_are_named(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.burst, 1)
    assert scene.header is not None
    largest = [
        {"file": "/site/vllm/worker.py", "line": 12, "bytes": 3 << 30, "count": 1, "since": 1760000000.0},
        {"file": None, "line": None, "bytes": 1 << 20, "count": 4, "since": None},
        {"file": "/no/size.py", "since": 1e300},
    ]
    written = {"t": 1760000100.0, "file": "/snap/oom-rank0-7-1.pickle", "pid": 7, "size": 2 << 20, "largest": largest}
    failed = written | {"file": "/snap/oom-\x1b[1mrank1.pickle", "problem": "OSError: full", "largest": []}
    scene.header["snapshots"] = [written, failed, {"file": "no time"}]

    _, out, _ = run(write(tmp_path, scene))

    section = out.partition("torch's allocator at the OutOfMemoryError\n")[2].partition("Numbers")[0]
    assert " ".join(section.split()) == (
        "snapshot /snap/oom-rank0-7-1.pickle of pid 7, for memory_viz, 2 MiB"
        " held 3 GiB in 1 block, since 2025-10-09 08:53:20Z: /site/vllm/worker.py:12"
        " held 1 MiB in 4 blocks, from before the history's oldest event: allocated before the history began"
        " snapshot /snap/oom-\\x1b[1mrank1.pickle was not written: OSError: full"
    )


def test_nonsense_in_a_header_is_left_out(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    nonsense: dict[str, Any] = {"xids": [{"t": "x", "xid": "y"}, 3], "log": 5, "before": [], "events": {}, "version": 1}
    scene.header |= nonsense

    status, out, err = run(write(tmp_path, scene))

    assert (status, err) == (0, "")
    assert "A crash with 9.32 GiB of GPU memory free. (likely)" in out


def test_an_incident_is_read_as_the_trace_that_it_is(leaked: Path) -> None:
    """`replay`, `check` and `advise` see in it what they see in the samples without its header."""
    snapshots = list(read_trace(str(leaked)))
    samples = [json.loads(line) for line in leaked.read_bytes().splitlines()[1:]]
    plain = list(map(parse_snapshot, samples))
    assert snapshots == plain

    watches, histories = [LeakReplay(), LeakReplay()], [TraceHistory(), TraceHistory()]
    for read_snapshots, watch, history in zip((snapshots, plain), watches, histories, strict=True):
        for snapshot in read_snapshots:
            watch.step(snapshot)
            history.step(snapshot)

    courses = [watch.gpus[0][2].leaking for watch in watches]
    assert courses[0] == courses[1]
    assert courses[0]
    assert histories[0].build_facts(EngineArgs()) == histories[1].build_facts(EngineArgs())


@pytest.mark.parametrize(
    "words", [("check", "--max-leak-per-thousand-requests", "1MiB", "--trace"), ("advise",), ("replay",)]
)
def test_the_other_commands_take_the_file(words: tuple[str, ...], leaked: Path) -> None:
    process = run_command(*words, str(leaked), "--json")

    assert process.stderr == ""
    assert read_data(process.stdout)


def test_a_start_in_milliseconds_is_no_fault(tmp_path: Path) -> None:
    """Some engines report process_start_time_seconds so, and the daemon writes it to its incident."""
    file = tmp_path / "2026-01-01T00-00-00Z.jsonl"
    header = {"headroom_trace": 1, "incident": {"t": 1.7e9, "what": "ended", "reason": "restarted"}}
    engine = {"model_name": "m", "engine": "0", "running": 1.0, "started_at": 1.7e12}
    records = [{"t": 1.7e9 + seconds, "gpus": [], "engines": [engine]} for seconds in (-5, 0)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in (header, *records)))

    process = run_command("postmortem", str(file))

    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("name", ["reason", "what", "cause", "sure", "state", "version", "sentence", "log", "\udc80"])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_lone_surrogate_in_an_incident_is_no_fault(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """It is valid JSON, and no text of any encoding."""
    file = tmp_path / "2026-01-01T00-00-00Z.jsonl"
    header = {"headroom_trace": 1, "incident": {"t": 1.7e9, "what": "ended", name: "\ud800"}}
    file.write_text(f"{json.dumps(header)}\n{json.dumps({'t': 1.7e9, 'gpus': [], 'engines': None})}\n")

    process = run_command("postmortem", str(file), *words)

    assert process.returncode in {0, 2}
    assert "Traceback" not in process.stderr
