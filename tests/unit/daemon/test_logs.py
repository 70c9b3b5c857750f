import json
import re
import subprocess
import sys

SCRIPT = """
import logging
from vllm_headroom.daemon import logs
logs.configure({log_format!r}, {log_level!r})
from vllm_headroom.log import Log
log = Log("vllm_headroom.part")
{body}
"""

FAIL = """
try:
    1 / 0
except ZeroDivisionError:
    {call}
"""

TS = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"


def logged(body: str, log_format: str = "logfmt", log_level: str = "info") -> list[str]:
    """Return the lines that a separate process writes to stderr, for logging is one per process."""
    script = SCRIPT.format(log_format=log_format, log_level=log_level, body=body)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout == ""
    return process.stderr.splitlines()


def test_a_logfmt_line_starts_with_time_level_and_event() -> None:
    (line,) = logged("log.info('source answers', source='engine', models=2, stable=True, reason=None)")

    assert re.fullmatch(rf'ts={TS} level=info event="source answers" source=engine models=2 stable=true reason=', line)


def test_a_json_line_starts_with_time_level_and_event() -> None:
    (line,) = logged("log.warning('source failed', source='engine', seconds=0.5)", log_format="json")
    record = json.loads(line)

    assert list(record)[:3] == ["ts", "level", "event"]
    assert re.fullmatch(TS, record.pop("ts"))
    assert record == {"level": "warning", "event": "source failed", "source": "engine", "seconds": 0.5}


def test_a_value_cannot_break_its_line_or_reach_the_terminal() -> None:
    (line,) = logged(r"""log.info("e", model='a"b\nlevel=error \x1b[31m\r', tab='\t')""")

    assert line.endswith(r'event=e model="a\"b\nlevel=error \x1b[31m\x0d" tab=\x09')


def test_lines_below_the_level_are_left_out() -> None:
    body = "log.debug('a'); log.info('b'); log.warning('c'); log.error('d')"

    assert [line.rsplit("=", 1)[1] for line in logged(body, log_level="debug")] == ["a", "b", "c", "d"]
    assert [line.rsplit("=", 1)[1] for line in logged(body, log_level="warning")] == ["c", "d"]


def test_libraries_speak_from_warnings_on_in_the_same_form() -> None:
    body = (
        "logging.getLogger('httpx').info('GET http://user:hunter2@engine')\n"
        "logging.getLogger('uvicorn.error').warning('too many %s', 'connections')"
    )

    (line,) = logged(body, log_level="debug")
    (as_json,) = logged(body, log_format="json", log_level="debug")

    assert re.fullmatch(rf'ts={TS} level=warning event="too many connections"', line)
    assert json.loads(as_json)["event"] == "too many connections"


def test_libraries_keep_to_a_level_above_warnings() -> None:
    assert logged("logging.getLogger('uvicorn.error').warning('too many')", log_level="error") == []


def test_in_logfmt_a_traceback_follows_its_line_indented() -> None:
    first_line, *block = logged(FAIL.format(call="log.exception('derivation failed', derivation='leak')"))

    assert re.fullmatch(rf'ts={TS} level=error event="derivation failed" derivation=leak', first_line)
    assert block[0] == "  Traceback (most recent call last):"
    assert block[-1] == "  ZeroDivisionError: division by zero"
    assert all(line.startswith("  ") for line in block)


def test_in_json_a_traceback_is_a_field() -> None:
    (line,) = logged(FAIL.format(call="log.exception('derivation failed')"), log_format="json")

    assert json.loads(line)["exception"].startswith("Traceback (most recent call last):\n")


def test_a_librarys_traceback_is_treated_alike() -> None:
    call = "logging.getLogger('asyncio').exception('Task failed')"

    first_line, *block = logged(FAIL.format(call=call))
    (as_json,) = logged(FAIL.format(call=call), log_format="json")

    assert first_line.endswith('level=error event="Task failed"')
    assert block[-1] == "  ZeroDivisionError: division by zero"
    assert json.loads(as_json)["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_line_said_while_no_thread_can_be_started_is_written_with_the_next_one() -> None:
    lines = logged(
        "import threading\n"
        "before = threading.stack_size(2**47)\n"  # more than there are addresses: the kernel refuses a thread
        "log.info('first')\n"
        "threading.stack_size(before)\n"
        "log.info('second')\n"
        "logging.getLogger().handlers[0]._waiting.join()"
    )

    assert [line.rpartition("=")[2] for line in lines] == ["first", "second"]
