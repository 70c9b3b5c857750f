"""The log of an engine, read from a file or standard input."""

from collections.abc import Iterable, Iterator
from itertools import chain

from vllm_headroom.model.start import EngineLog, EngineStart
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import find_other_format, open_lines


def read_engine_log(name: str) -> EngineLog:
    """Return the contents of a log; the log is a file, or standard input if the name is "-".

    Raises BadInput if the log cannot be read or has no line of an engine.
    """
    with open_lines(name) as lines:
        return parse_engine_log(lines)


def parse_engine_log(lines: Iterator[bytes], expected: str = "a log of an engine") -> EngineLog:
    """Return what the lines of a log say.

    Raise BadInput, with `expected` in its text, if no line is an engine's. The text quotes nothing
    of the file, because it may contain secrets.
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
    """Return the start to judge: the newest that failed, else the newest; there must be one."""
    newest_first = sorted(starts, key=lambda start: start.first_line, reverse=True)
    for start in newest_first:
        if start.root_failure is not None:
            return start
    return newest_first[0]
