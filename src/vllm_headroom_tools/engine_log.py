"""An engine's log, read from a file or from standard input."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from vllm_headroom.model.start import EngineLog, EngineStart
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import find_other_format, open_lines

LOG_LIMIT_BYTES: Final = 2**30
"""The maximum size of a log; `load` has the same limit for its prompts. Reading one of this size
takes a minute. Without a maximum, reading a device such as /dev/zero would never end.
"""


def read_engine_log(name: str) -> EngineLog:
    """Parse the log in a file, or on standard input for the name "-".

    Raises BadInput if the log cannot be read or has no engine's line.
    """
    with open_lines(name) as lines:
        return parse_engine_log(lines)


def parse_engine_log(lines: Iterator[bytes], expected: str = "a log of an engine") -> EngineLog:
    """Parse the lines of a log.

    Raises BadInput if the log is larger than LOG_LIMIT_BYTES. Also raises BadInput if no line is
    from an engine; this message contains `expected`. No message quotes the file, which may contain
    secrets.
    """
    lines = _limit_lines(lines)
    first_line = next(lines, b"")
    log = read_log(chain((first_line,), lines))
    if log.starts:
        return log
    other_format = find_other_format(first_line)
    if other_format is not None:
        raise BadInput(f"is not {expected}, but {other_format}")
    raise BadInput(f"is not {expected}: no line of {log.line_count:,} is an engine's")


def _limit_lines(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines; raise BadInput at the first one beyond LOG_LIMIT_BYTES."""
    size_bytes = 0
    for line in lines:
        size_bytes += len(line)
        if size_bytes > LOG_LIMIT_BYTES:
            raise BadInput(
                f"has more than {LOG_LIMIT_BYTES >> 20} MiB: pass only the part with the start and"
                " the end of the run"
            )
        yield line


def find_decisive_start(starts: Iterable[EngineStart]) -> EngineStart:
    """Return the newest start that failed, or else the newest.

    `starts` must not be empty.
    """
    newest_first = sorted(starts, key=lambda start: start.first_line, reverse=True)
    for start in newest_first:
        if start.root_failure is not None:
            return start
    return newest_first[0]
