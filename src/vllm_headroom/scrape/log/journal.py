"""Read a unit's lines from systemd's journal with journalctl."""

import asyncio
import contextlib
import json
from typing import Final

from vllm_headroom.model import Failure
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Source

PAUSE_SECONDS: Final = 10.0
"""The time between two calls to journalctl. Each call takes at least 20 ms of CPU time."""

MOST_LINES: Final = 20_000
"""The first call reads this many of the newest lines. They cover a startup and a day under load."""

MOST_BYTES: Final = 4 * 2**20
"""The maximum number of bytes read from journalctl's output. A line takes half a KiB as JSON. The
next call reads the rest.
"""

CLOSE_JOURNAL_SECONDS: Final = 0.2
"""How long the reader waits for a killed process to exit."""

SHOWN_CHARACTERS: Final = 200
"""The number of bytes of journalctl's error message that are shown."""


class Journal:
    """Reads additions to a unit's lines, at most once per PAUSE_SECONDS."""

    def __init__(self, unit: str, *, program: str = "journalctl") -> None:
        self._unit = unit
        self._program = program
        self._cursor: str | None = None
        """journald's cursor for the newest line read, or None before the first line."""
        self._next_seconds = 0.0
        """When journalctl is to be called next, on the event loop's clock."""
        self._failure: Failure | None = None
        """Why the last call failed, or None if it succeeded."""

    async def fetch(self, timeout_seconds: float) -> LogBatch | Failure:
        """Return the additions; never raise.

        Between two calls to journalctl, returns the last failure or an empty batch.
        """
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds < self._next_seconds:
            return self._failure or LogBatch(content=b"")
        self._next_seconds = now_seconds + PAUSE_SECONDS
        answer = await self._call(timeout_seconds)
        self._failure = None
        if isinstance(answer, Failure):
            self._failure = answer
            return answer
        # The first output covers the past, so its lines may come from an earlier run.
        is_first = self._cursor is None
        self._cursor = _find_cursor(answer) or self._cursor
        return LogBatch(content=answer, is_old=is_first, is_broken=is_first)

    async def _call(self, timeout_seconds: float) -> bytes | Failure:
        """Return journalctl's output up to its last full line.

        Returns a Failure if the call fails.
        """
        arguments = [f"--unit={self._unit}", "--output=json", "--all", "--no-pager"]
        if self._cursor is None:
            arguments.append(f"--lines={MOST_LINES}")
        else:
            arguments.append(f"--after-cursor={self._cursor}")
        try:
            process = await asyncio.create_subprocess_exec(
                self._program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError:
            problem = f"{self._program} is not installed here"
            return _fail(Reason.NOT_FOUND, f"{problem}: name a file in its place")
        except OSError as error:
            return build_unavailable(
                Source.LOG, f"{self._program} cannot be run", error, "name a file in its place"
            )
        try:
            async with asyncio.timeout(timeout_seconds):
                return await _read_answer(process, self._unit)
        except TimeoutError:
            problem = f"journalctl did not answer within {timeout_seconds:g} s"
            return _fail(Reason.TIMEOUT, f"{problem}: look at the journal's size")
        finally:
            # No process is left behind, even if the tick is cancelled.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_JOURNAL_SECONDS):
                    await process.communicate()


async def _read_answer(process: asyncio.subprocess.Process, unit: str) -> bytes | Failure:
    """Return journalctl's output, up to MOST_BYTES, or a Failure if journalctl reports an error."""
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    content = bytearray()
    while len(content) < MOST_BYTES:
        part = await process.stdout.read(2**16)
        if not part:
            break
        content += part
    else:
        del content[content.rfind(b"\n") + 1 :]
        return bytes(content)
    message = await process.stderr.read(SHOWN_CHARACTERS)
    if await process.wait():
        problem = message.decode(errors="replace").strip()
        return _fail(Reason.NO_PERMISSION, f"journalctl fails for {unit}: {problem}")
    if not content and b"No journal files were opened due to insufficient permissions" in message:
        advice = "add the daemon's user to the group systemd-journal"
        return _fail(Reason.NO_PERMISSION, f"the journal cannot be read: {advice}")
    return bytes(content)


def _find_cursor(content: bytes) -> str | None:
    """Return journald's cursor for the newest line, or None if the line has none."""
    newest_line = content.rstrip(b"\n").rpartition(b"\n")[2]
    try:
        cursor = json.loads(newest_line).get("__CURSOR")
    except (ValueError, AttributeError, RecursionError):
        return None
    return cursor if isinstance(cursor, str) else None


def _fail(reason: Reason, problem: str) -> Failure:
    message = f"the engine's log: {problem} (HEADROOM_ENGINE_LOG)"
    return Failure(source=Source.LOG, reason=reason, message=message)
