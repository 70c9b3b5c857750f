"""A trace whose last line is only in part there: the daemon ended while it wrote it, or is writing it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import recorded, snapshots

HEADER = b'{"headroom_trace": 1}\n'


def test_a_last_line_that_is_cut_off_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    whole = '{"t": 1, "engines": [{"model_name": "é"}]}'.encode()
    for kept in range(1, len(whole)):
        (seen,) = snapshots([HEADER, whole + b"\n", whole[:kept]])

        assert seen.time_seconds == 1.0
        assert capsys.readouterr().err == "the trace: line 3, the last, is cut off and left out\n"


def test_a_line_without_an_end_is_cut_off_only_where_it_is_the_last() -> None:
    with pytest.raises(BadInput, match=r"^line 2: not JSON: Expecting ',' delimiter at column 8$"):
        list(snapshots([HEADER, b'{"t": 1', b"\n"]))


def test_the_day_before_a_cut_off_line_is_read_and_the_line_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(HEADER + b'{"t": 1}\n{"t": 2}\n{"t": 3, "gp')

    assert [snapshot.time_seconds for snapshot in recorded(str(file))] == [1.0, 2.0]
    assert capsys.readouterr() == ("", f"{file}: line 4, the last, is cut off and left out\n")


def test_standard_input_may_be_cut_off_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(HEADER + b"{")))

    assert list(recorded("-")) == []
    assert capsys.readouterr().err == "standard input: line 2, the last, is cut off and left out\n"


def test_a_broken_line_in_the_middle_refuses_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(HEADER + b'{"t": 1\n{"t": 2}\n')

    with pytest.raises(BadInput, match=r"^line 2: not JSON"):
        list(recorded(str(file)))
