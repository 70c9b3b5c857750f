"""Traces as other tools leave them: packed, with other ends of lines, in another encoding, or no traces at all."""

from __future__ import annotations

import gzip
import io
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_headroom.trace.incident import Incident
from vllm_headroom.vocabulary import IncidentKind
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.postmortem.report import read_facts
from vllm_headroom_tools.trace import read_trace

HEADER = b'{"headroom_trace": 1}\n'
TRACE = HEADER + b"".join(b'{"t": %d}\n' % second for second in range(1, 4))
CSV = b"timestamp, index, uuid, memory.used [MiB]\n2025/10/09 08:53:20.000, 0, GPU-a, 75000 MiB\n"
NO_TRACE = 'line 1: no trace of this version, whose first line is {"headroom_trace": 1}; this '


def times(trace: str) -> list[float]:
    return [snapshot.time_seconds for snapshot in read_trace(trace)]


def write_file(folder: Path, content: bytes) -> str:
    file = folder / "trace"
    file.write_bytes(content)
    return str(file)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(TRACE),
        gzip.compress(HEADER + b'{"t": 1}\n') + gzip.compress(HEADER + b'{"t": 2}\n{"t": 3}\n'),
        b"\xef\xbb\xbf" + TRACE,
        TRACE.replace(b"\n", b"\r\n"),
        gzip.compress(b"\xef\xbb\xbf" + TRACE.replace(b"\n", b"\r\n")),
    ],
    ids=["gzip", "two of gzip", "byte order mark", "CRLF", "all at once"],
)
def test_a_trace_is_read_as_tools_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    assert times(write_file(tmp_path, content)) == [1.0, 2.0, 3.0]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
    assert times("-") == [1.0, 2.0, 3.0]


def test_how_far_it_has_come_is_not_shown_of_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported_sizes: list[int | None] = []

    def watched(lines: Iterator[bytes], whole_bytes: int | None) -> Iterator[bytes]:
        reported_sizes.append(whole_bytes)
        return lines

    monkeypatch.setattr("vllm_headroom_tools.trace.track_lines", watched)
    for content in (TRACE, gzip.compress(TRACE)):
        list(read_trace(write_file(tmp_path, content)))

    assert reported_sizes == [len(TRACE), None]


def test_the_header_of_an_incident_is_read_where_it_is_packed(tmp_path: Path) -> None:
    header = b'{"headroom_trace": 1, "incident": {"t": 5, "what": "ended"}}\n'

    assert read_facts(Path(write_file(tmp_path, gzip.compress(header)))) == Incident(t=5, what=IncidentKind.ENDED)


@pytest.mark.parametrize(
    "content", [gzip.compress(TRACE)[:-12], gzip.compress(TRACE) + TRACE, b"\x1f\x8bhello", b"\x1f\x8b"]
)
def test_what_gzip_packed_is_said_to_be_spoiled_where_it_is(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadInput, match="what gzip packed is damaged, cut off or followed by something else"):
        times(write_file(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x28\xb5\x2f\xfd\x04", "is packed by zstd: unpack it first, only gzip's is read as it is"),
        (lzma.compress(TRACE), "is packed by xz: unpack it first, only gzip's is read as it is"),
        (TRACE.decode().encode("utf-16"), "is UTF-16, as some shells write with >: make UTF-8 of it"),
        (CSV, "begins with 'timestamp, index, uuid, memory.used [MiB]'"),
        (b"\x1b[2J" * 1000, "begins with '" + 15 * r"\x1b[2J" + "'"),
        (b'{"headroom_trace": 2}', """begins with '{"headroom_trace": 2}'"""),
        (b"INFO 04-22 15:13:32 [api_server.py:10] hi\n", "is a log of an engine, which vllm-headroom advise reads"),
        (b"", "is empty"),
    ],
)
def test_what_is_no_trace_is_reported_by_what_it_is(tmp_path: Path, content: bytes, problem: str) -> None:
    trace = write_file(tmp_path, content)

    with pytest.raises(BadInput, match=f"^{re.escape(f'{trace}: {NO_TRACE}{problem}')}$"):
        times(trace)
