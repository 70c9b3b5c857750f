from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.samples import snapshot
from tests.unit.commands.doctor.looking import examined, lines
from vllm_headroom.trace.entries import HEADER, build_record, encode_line
from vllm_headroom.trace.flight import INCIDENTS, append_to_record, list_incidents, write_incident
from vllm_headroom.trace.recorder import NOT_A_TRACE
from vllm_headroom_tools.doctor.fixes import Check, Status

USER = f"user {os.getuid()}"


def state_dir(path: Path) -> Check:
    return examined(STATE_DIR=str(path))["state_dir"]


def trace_file(path: Path) -> Check:
    return examined(TRACE_FILE=str(path))["trace_file"]


def test_what_is_not_configured_does_not_apply() -> None:
    findings = examined()

    assert {findings[name].state for name in ("state_dir", "trace_file")} == {Status.NOT_APPLICABLE}


@pytest.mark.parametrize("below", [".", "made/by/the/daemon"])
def test_a_state_directory_that_can_be_written_is_left_as_it_was(tmp_path: Path, below: str) -> None:
    check = state_dir(tmp_path / below)

    assert (check.state, check.text) == (Status.OK, f"{tmp_path / below} can be written by {USER}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "state"])
def test_a_state_directory_on_a_file_is_missing(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()

    check = state_dir(file / below)

    assert check.state is Status.MISSING
    assert check.text == f"{file / below} cannot be written by {USER}: Not a directory"
    assert "  env: [{name: HEADROOM_STATE_DIR, value: /var/lib/vllm-headroom}]" in lines(check)


@pytest.mark.parametrize("folder", ["/proc/self", "/proc/vllm-headroom"])
def test_a_file_system_that_takes_no_files_is_missing(folder: str) -> None:
    assert state_dir(Path(folder)).state is Status.MISSING
    assert trace_file(Path(folder) / "trace.jsonl").state is Status.MISSING


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_of_another_user_is_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    check = state_dir(tmp_path)

    assert check.state is Status.MISSING
    assert "Permission denied" in check.text


@pytest.mark.parametrize(
    "content", [None, b"", encode_line(HEADER), b'{"headroom_trace": 1}\n{"t": 1.0}\n', b'{"headr']
)
def test_a_trace_that_can_be_written_is_left_as_it_was(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "trace.jsonl"
    if content is not None:
        file.write_bytes(content)

    assert trace_file(file).state is Status.OK
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if content is None else [content])


def test_a_file_that_is_no_trace_is_missing_another_name(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("root:x:0:0\n")

    check = trace_file(file)

    assert check.state is Status.MISSING
    assert "the file is there and is no trace" in check.text
    assert lines(check) == [f"HEADROOM_TRACE_FILE={file}.jsonl"]
    assert file.read_text() == "root:x:0:0\n"


def test_an_incident_is_no_trace_to_record_into_for_the_daemon_would_not_either(tmp_path: Path) -> None:
    sample = build_record(snapshot())
    append_to_record(tmp_path, encode_line(sample))
    write_incident(tmp_path, sample["t"], {"t": sample["t"]})
    (incident,) = list_incidents(tmp_path / INCIDENTS)
    content = incident.read_bytes()

    check = trace_file(incident)

    assert (check.state, incident.read_bytes()) == (Status.MISSING, content)
    assert check.text.endswith(f": {NOT_A_TRACE}")


def test_a_trace_in_a_folder_that_is_not_there_is_missing(tmp_path: Path) -> None:
    check = trace_file(tmp_path / "nowhere" / "trace.jsonl")

    assert check.state is Status.MISSING
    assert check.text.endswith("No such file or directory")


def test_a_trace_that_is_a_folder_is_missing(tmp_path: Path) -> None:
    assert trace_file(tmp_path).text.endswith("Is a directory")
