"""Can what the daemon keeps be written?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from vllm_headroom.commands.doctor.fixes import POD, Check, Fix, Status, setting
from vllm_headroom.trace.parse import LONGEST_LINE
from vllm_headroom.trace.recorder import FOREIGN, begins_one
from vllm_headroom.trace.writing import attempted
from vllm_headroom.worker import Worker

FILE_SECONDS: Final = 2.0
"""As the daemon waits for its state: beyond this the volume counts as hung."""

FOLDER: Final = "/var/lib/vllm-headroom"


async def state_dir(folder: Path | None) -> Check:
    """Tell whether the leak detector's state can be kept."""
    if folder is None:
        text = (
            "HEADROOM_STATE_DIR is not set: a restart of the daemon forgets what the leak detector learned, and nothing"
            " is kept for vllm-headroom postmortem"
        )
        return Check(Status.NOT_APPLICABLE, text)
    problem = await _problem(partial(_write_into, folder))
    return _judged(folder, problem, _volume("HEADROOM_STATE_DIR", FOLDER))


async def trace_file(file: Path | None) -> Check:
    """Tell whether samples can be recorded."""
    if file is None:
        text = "HEADROOM_TRACE_FILE is not set: nothing is recorded"
        return Check(Status.NOT_APPLICABLE, text)
    problem = await _problem(partial(_record_in, file))
    if problem == FOREIGN:
        return _judged(file, problem, (setting(f"HEADROOM_TRACE_FILE={file}.jsonl"),))
    return _judged(file, problem, _volume("HEADROOM_TRACE_FILE", f"{FOLDER}/trace.jsonl"))


def _judged(path: Path, problem: str | None, fixes: tuple[Fix, ...]) -> Check:
    user = f"user {os.getuid()}"
    if problem is None:
        return Check(Status.OK, f"{path} can be written by {user}")
    return Check(Status.MISSING, f"{path} cannot be written by {user}: {problem}", fixes=fixes)


def _volume(variable: str, value: str) -> tuple[Fix, ...]:
    lines = (
        "volumes: [{name: headroom-state, emptyDir: {}}]",
        "containers:  # initContainers, where the sidecar is a native one",
        "- name: headroom",
        f"  volumeMounts: [{{name: headroom-state, mountPath: {FOLDER}}}]",
        f"  env: [{{name: {variable}, value: {value}}}]",
    )
    return (
        Fix(where=POD, lines=lines),
        Fix(where=f"{POD}, for a volume that is not an emptyDir", lines=("securityContext: {fsGroup: 65532}",)),
        Fix(where="in the systemd unit", lines=("StateDirectory=vllm-headroom", f"Environment={variable}={value}")),
    )


async def _problem(attempt: Callable[[], None]) -> str | None:
    """Return what went wrong; on a thread of its own, since a volume can hang."""
    return await attempted(Worker[None]("files"), attempt, FILE_SECONDS)


def _write_into(folder: Path) -> None:
    """Write a file that is gone afterwards where the daemon would make one, or its folder; raise OSError."""
    while not folder.exists():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".vllm-headroom-doctor-") as file:
        file.write(b"\0" * 4096)
        file.flush()
        os.fsync(file.fileno())


def _record_in(file: Path) -> None:
    """Try what the daemon does with its trace, and leave it as it is; raise OSError, or ValueError for no trace."""
    file.parent.stat()
    _write_into(file.parent)
    if not file.exists():
        return
    with file.open("a+b") as stream:
        stream.seek(0)
        head = stream.readline(LONGEST_LINE)
    if not begins_one(head):
        raise ValueError(FOREIGN)
