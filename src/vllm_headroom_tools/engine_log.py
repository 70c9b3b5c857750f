"""An engine's log, read from a file or from standard input."""

from collections.abc import Iterable, Iterator
from itertools import chain

from vllm_headroom.model.start import EngineLog, EngineStart
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import find_other_format, open_lines


def read_engine_log(name: str) -> EngineLog:
    """Parse the log in a file, or on standard input if the name is "-".

    Raises BadInput if the log cannot be read or contains no line of an engine.
    """
    with open_lines(name) as lines:
        return parse_engine_log(lines)


def parse_engine_log(lines: Iterator[bytes], expected: str = "a log of an engine") -> EngineLog:
    """Parse the lines of a log.

    Raises BadInput, with `expected` in its message, if no line is from an engine. The message does
    not quote the file, which may contain secrets.
    """
    first_line = next(lines, b"")
    log = read_log(chain((first_line,), lines))
    if log.starts:
        return log
    other_format = find_other_format(first_line)
    if other_format is not None:
        raise BadInput(f"is not {expected}, but {other_format}")
    raise BadInput(f"is not {expected}: no line of {log.line_count:,} is an engine's")


def find_decisive_start(starts: Iterable[EngineStart]) -> EngineStart:
    """Return the newest start that failed, or else the newest; `starts` must not be empty."""
    newest_first = sorted(starts, key=lambda start: start.first_line, reverse=True)
    for start in newest_first:
        if start.root_failure is not None:
            return start
    return newest_first[0]
