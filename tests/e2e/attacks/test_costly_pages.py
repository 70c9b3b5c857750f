"""Pages made to be costly: the engine's half fails with its own reason, and nothing else waits for them."""

from __future__ import annotations

import contextlib
import platform
import resource
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.bench.processes import resident_bytes
from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, Hangup, page
from tests.process import Page, daemon, engine_answers, eventually, peak_bytes
from vllm_headroom.daemon.engine_watch import SMALL_PAGE

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
RUNNING = "vllm:num_requests_running"
MIB = 2**20

MODELS_TIMES_SETTINGS = "".join(
    f'{RUNNING}{{model_name="m{number}",engine="0"}} 1\n'
    f'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{number}"}} 1\n'
    for number in range(1000)
)
ESCAPE = '\\"'
ESCAPES = f'{RUNNING}{{model_name="{ESCAPE * 400_000}",engine="0"}} 1\n'
FORTY = ",".join(f'l{label}="v"' for label in range(40))
MANY_LABELS = "".join(f'{RUNNING}{{model_name="m{number}",{FORTY}}} 1\n' for number in range(4999))
WIDE_LINE = RUNNING + "{" + ",".join(f'l{label}="v"' for label in range(200)) + "} 1\n"
MANY_MODELS = "".join(f'{RUNNING}{{model_name="m{number}",engine="0"}} 1\n' for number in range(4999))
COSTLY = {
    "models-times-settings": MODELS_TIMES_SETTINGS,
    "a-label-of-escapes": ESCAPES,
    "many-labels": MANY_LABELS,
    "a-line-of-200-labels": WIDE_LINE,
    "many-models": MANY_MODELS,
}
FIRST_BOUND = {
    "models-times-settings": "has 1000 engines and models",
    "a-label-of-escapes": "has a line of 800053 characters",
    "many-labels": "524288 characters of those that are read",
    "a-line-of-200-labels": "has a line of more than 128 labels",
    "many-models": "has 4999 engines and models",
}

OF_THE_LIFE = {
    f"headroom_engine_{name}" for name in ("state", "start_timestamp_seconds", "restarts_total", "exits_total")
}
"""What is known without a page."""


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_page_is_a_failure_of_its_own_kind(name: str) -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="2", GPU_SAMPLE_INTERVAL_SECONDS="1") as running,
    ):
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")

        engine.answer = page(COSTLY[name])
        refused_page = running.sees(lambda page: page.value("source_up", source="engine") == 0, "the page is refused")

        assert refused_page.value("source_failures_total", source="engine", reason="out_of_bounds") >= 1
        assert refused_page.names("headroom_engine_") <= OF_THE_LIFE
        eventually(lambda: FIRST_BOUND[name] in running.log(), "the log names the bound")

        engine.answer = page(RECORDED)
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers again")


ENGINES, CHARACTERS, SHARED = (
    "parse.engines.MOST_PAGE_ENGINES",
    "parse.exposition.MOST_CHARACTERS",
    "parse.engines.MOST_SHARED_READINGS",
)
LINE, DEADLINE = "parse.exposition.LONGEST_LINE", "daemon.engine_watch.PARSE_SECONDS"


@pytest.mark.parametrize(
    ("name", "lifted", "says"),
    [
        ("models-times-settings", (ENGINES, DEADLINE), "readings of what they share"),
        ("models-times-settings", (ENGINES, SHARED), "was not understood within 2 s"),
        ("a-label-of-escapes", (LINE, DEADLINE), "characters of those that are read"),
        ("many-labels", (CHARACTERS, DEADLINE), "engines and models"),
    ],
)
def test_behind_the_bound_that_a_page_breaks_first_stands_another(
    name: str, lifted: tuple[str, ...], says: str
) -> None:
    with (
        EngineServer(page(COSTLY[name])) as engine,
        daemon(ENGINE_URL=engine.url, module="tests.e2e.attacks.unprotected", WITHOUT=",".join(lifted)) as running,
    ):
        refused_page = running.sees(lambda page: page.value("source_up", source="engine") == 0, "the page is refused")

        assert refused_page.value("source_failures_total", source="engine", reason="out_of_bounds") >= 1
        eventually(lambda: says in running.log(), "it is told why")


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "hints-without-an-answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "60", "incomplete"),
    "a-page-in-crumbs": (HEAD, b"1\r\n#\r\n", "60", "out_of_bounds"),
}


@pytest.mark.parametrize(("head", "piece", "timeout", "reason"), FLOODS.values(), ids=FLOODS)
def test_an_answer_in_endless_little_pieces_is_given_up(head: bytes, piece: bytes, timeout: str, reason: str) -> None:
    """Each piece takes a step of the event loop's; it is given up long before its time."""

    def flood(connection: socket.socket, closing: threading.Event) -> None:
        connection.sendall(head)
        with contextlib.suppress(OSError):  # it is given up
            while not closing.is_set():
                connection.sendall(piece * 20_000)
        raise Hangup

    with (
        EngineServer(flood) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="60", ENGINE_TIMEOUT_SECONDS=timeout) as running,
    ):
        refused_page = running.sees(lambda page: page.value("source_up", source="engine") == 0, "the page is refused")

        assert refused_page.value("source_failures_total", source="engine", reason=reason) == 1


WIDE = "\N{GRINNING FACE}"
"""One character like it makes Python keep four bytes for every character of the page."""

LARGE = {
    "nothing-that-is-read": f"# {WIDE}\n" + "other 1\n" * 500_000,
    "one-line": f"# {WIDE}" + "x" * 4_000_000 + "\nup 1\n",
    "all-that-is-read": f"# {WIDE}\n" + (RUNNING + '{model_name="m",engine="0"} 1\n') * 70_000,
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_no_page_that_is_read_takes_the_daemon_over_its_memory_limit(text: str) -> None:
    assert len(text.encode()) < 4 * MIB
    with (
        EngineServer(page(text)) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="2") as running,
    ):
        running.sees(lambda page: page.has("source_up", source="engine"), "the first sample")
        old_count = len(engine.requests)
        running.sees(lambda _: len(engine.requests) >= old_count + 3, "it was read again and again")

        assert peak_bytes(running.process.pid) < 112 * MIB


def is_read(engine: EngineServer, times: int, _: Page) -> bool:
    return len(engine.requests) >= times


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_memory_that_a_large_page_took_is_given_back() -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="0.1") as running,
    ):
        running.sees(lambda _: len(engine.requests) >= 20, "it has read some pages")
        usual_bytes = resident_bytes(running.process.pid)

        for text in ("x" * 5 * MIB, "x" * 3_900_000 + "\n"):
            engine.answer = page(text)
            wanted_count = len(engine.requests) + 3
            running.sees(partial(is_read, engine, wanted_count), "a large page was read")
        engine.answer = page(RECORDED)
        running.sees(engine_answers, "the usual page is read again")

        assert resident_bytes(running.process.pid) < usual_bytes + 6 * MIB


def virtual_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_page_for_which_there_is_no_memory_costs_samples_and_not_the_daemon() -> None:
    """Threads have started before memory is short, and reserve no addresses beyond those that they use."""
    large = "# " + "x" * SMALL_PAGE + f"\n{RECORDED}"
    with (
        EngineServer(page(large)) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="0.2", MALLOC_ARENA_MAX="1") as running,
    ):
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")
        running.get("/healthz")
        pid = running.process.pid
        _, hard_limit = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (virtual_bytes(pid) + 3 * MIB, hard_limit))
        engine.answer = page("# " + "x" * (4 * MIB - 1000) + f"\n{RECORDED}"[-900:])
        old_count = len(engine.requests)
        eventually(lambda: "MemoryError" in running.log(), "it is told")
        eventually(lambda: len(engine.requests) >= old_count + 3, "it asks on")

        resource.prlimit(pid, resource.RLIMIT_AS, (hard_limit, hard_limit))
        engine.answer = page(RECORDED)
        later_page = running.sees(
            lambda page: page.value("source_up", source="engine") == 1, "the engine answers again"
        )
        assert later_page.value("source_failures_total", source="engine", reason="unexpected") >= 1


def names_anew(connection: socket.socket, closing: threading.Event) -> None:
    """Answer with engines that serve, all but one under names that nobody has had before."""
    number = time.monotonic_ns()
    lines = [
        f'vllm:prefix_cache_{name}_total{{model_name="{number}-{WIDE * 900}",engine="{engine}"}} 1\n'
        for engine in range(250)
        for name in ("queries", "hits")
    ]
    serving = (RUNNING, "vllm:generation_tokens_total")
    lines += [f'{name}{{model_name="m",engine="0"}} {number}\n' for name in serving]
    page("".join(lines))(connection, closing)


def test_names_that_are_new_at_every_look_do_not_take_the_daemon_over_its_memory_limit() -> None:
    with (
        EngineServer(names_anew) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="0.2") as running,
    ):
        eventually(lambda: len(engine.requests) >= 100, "a hundred looks", deadline_seconds=300)

        assert running.page().value("source_up", source="engine") == 1
        assert peak_bytes(running.process.pid) < 112 * MIB


def test_formats_that_scrapers_make_up_do_not_take_it_there_either() -> None:
    longest = "".join(f'{RUNNING}{{model_name="{WIDE * 2000}",engine="{engine}"}} 1\n' for engine in range(250))
    with EngineServer(page(longest)) as engine, daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="5") as running:
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")
        for version in range(12):
            answer = running.get("/metrics", Accept=f"application/openmetrics-text;version=1.0.{version}")
            assert len(answer.content) > 2 * MIB

        assert peak_bytes(running.process.pid) < 112 * MIB
