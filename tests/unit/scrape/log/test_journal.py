"""A unit's lines come from journalctl, each once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_headroom.model import Failure
from vllm_headroom.scrape.log import journal
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.log.journal import Journal
from vllm_headroom.vocabulary import Reason


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a journalctl that notes its arguments and prints the file `lines`."""
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\ncat {tmp_path}/lines\n')
    program.chmod(0o755)
    (tmp_path / "lines").write_text("")
    return program


def write(program: Path, *messages: str) -> None:
    lines = [json.dumps({"MESSAGE": message, "__CURSOR": f"after {message}"}) for message in messages]
    (program.parent / "lines").write_text("".join(f"{line}\n" for line in lines))


def fetch(source: Journal) -> Any:
    source._next_seconds = 0.0
    return asyncio.run(source.fetch(5.0))


def test_the_next_call_begins_after_the_newest_line(program: Path) -> None:
    source = Journal("vllm.service", program=str(program))
    write(program, "a", "b")
    first_batch = fetch(source)
    write(program, "c")
    second = fetch(source)

    assert (first_batch.is_old, second.is_old) == (True, False)
    assert b'"c"' in second.content
    arguments = (program.parent / "arguments").read_text().splitlines()
    assert arguments[0] == "--unit=vllm.service --output=json --all --no-pager --lines=20000"
    assert arguments[1] == "--unit=vllm.service --output=json --all --no-pager --after-cursor=after b"


def test_what_is_read_is_bounded(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 2**17)
    write(program, *(str(number) for number in range(10_000)))
    source = Journal("u", program=str(program))
    first_batch = fetch(source)

    assert isinstance(first_batch, LogBatch)
    assert len(first_batch.content) < 2**17 + 2**16
    assert first_batch.content.endswith(b"\n")


def test_a_journal_that_cannot_be_read_is_a_failure(program: Path, tmp_path: Path) -> None:
    assert fetch(Journal("u", program=str(tmp_path / "none"))).reason is Reason.NOT_FOUND

    program.write_text("#!/bin/sh\necho 'No journal files were opened due to insufficient permissions.' >&2\n")
    assert fetch(Journal("u", program=str(program))).reason is Reason.NO_PERMISSION
    program.write_text("#!/bin/sh\necho 'Failed to add filter' >&2\nexit 1\n")
    failure = fetch(Journal("u", program=str(program)))
    assert isinstance(failure, Failure)
    assert "Failed to add filter" in failure.message


def test_a_journalctl_that_hangs_is_ended(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    source = Journal("u", program=str(program))

    failure = asyncio.run(source.fetch(0.05))
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.TIMEOUT
