"""A trace whose last line is only in part there, or whose parts are not in their order: what is noted of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import parse_trace, read_trace

HEADER = b'{"headroom_trace": 1}\n'


def test_a_last_line_that_is_cut_off_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    complete_line = '{"t": 1, "engines": [{"model_name": "é"}]}'.encode()
    for length in range(1, len(complete_line)):
        (snapshot,) = parse_trace([HEADER, complete_line + b"\n", complete_line[:length]])

        assert snapshot.time_seconds == 1.0
        assert capsys.readouterr().err == "the trace: line 3, the last, is cut off and left out\n"


def test_a_line_without_an_end_is_cut_off_only_where_it_is_the_last() -> None:
    with pytest.raises(BadInput, match=r"^line 2: not JSON: Expecting ',' delimiter at column 8$"):
        list(parse_trace([HEADER, b'{"t": 1', b"\n"]))


def test_the_day_before_a_cut_off_line_is_read_and_the_line_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(HEADER + b'{"t": 1}\n{"t": 2}\n{"t": 3, "gp')

    assert [snapshot.time_seconds for snapshot in read_trace(str(file))] == [1.0, 2.0]
    assert capsys.readouterr() == ("", f"{file}: line 4, the last, is cut off and left out\n")


def test_standard_input_may_be_cut_off_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(HEADER + b"{"))))

    assert list(read_trace("-")) == []
    assert capsys.readouterr().err == "standard input: line 2, the last, is cut off and left out\n"


def test_a_broken_line_in_the_middle_refuses_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(HEADER + b'{"t": 1\n{"t": 2}\n')

    with pytest.raises(BadInput, match=f"^{file}: line 2: not JSON"):
        list(read_trace(str(file)))


def test_files_in_the_wrong_order_are_noted_once_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = (7200, 7205, 7203, 0, 5, 4000, 5)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(HEADER + b"".join(b'{"t": %d}\n' % seconds for seconds in times))

    assert [snapshot.time_seconds for snapshot in read_trace(str(file))] == list(times)
    assert capsys.readouterr().err == (
        f"{file}: at 1970-01-01 00:00:00Z the time goes back by 2 h 0 min: a clock was set back, or files were put"
        " together in a wrong order: FILE.1 comes before FILE\n"
    )
