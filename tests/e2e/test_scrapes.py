"""How the real daemon answers those who ask: a kubelet among scrapers, scrapes of one sample, and what goes along."""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from tests.process import Daemon, daemon, eventually

LOOPBACK: Final = "127.0.0.1"
SCRAPERS: Final = 100
SO_TIMESTAMPNS: Final = 35
"""Linux, include/uapi/asm-generic/socket.h: the kernel shows when data came."""

ONE_SAMPLE: Final = {"SAMPLE_INTERVAL_SECONDS": "300"}
TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK")


def question(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def connected(running: Daemon) -> socket.socket:
    """Return a connection that the daemon has answered on, and that shows when data came."""
    client = socket.create_connection((LOOPBACK, int(running.url.rpartition(":")[2])), timeout=60)
    client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def tells() -> bool:  # the kernel begins with it some time after it was asked to
        client.sendall(question("/healthz"))
        return answered(client) is not None

    eventually(tells, "data is stamped")
    return client


def answered(client: socket.socket) -> tuple[int, int] | None:
    """Read an answer of one packet; return when it came, in seconds and nanoseconds, None where nobody knows."""
    data, ancillary, _, _ = client.recvmsg(2**16, 1024)
    assert data.startswith(b"HTTP/1.1 ")
    stamps = (value for level, kind, value in ancillary if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS))
    return next((struct.unpack("ll", stamp) for stamp in stamps), None)


def stat(running: Daemon) -> list[str]:
    return Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(") ")[2].split()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/gate/ready"])
def test_a_kubelet_does_not_wait_for_a_crowd_of_scrapers_that_came_before_it(path: str) -> None:
    with ExitStack() as stack, daemon(**ONE_SAMPLE) as running:
        running.sees(lambda page: page.has("engine_state"), "a first sample")
        kubelet, *crowd = (stack.enter_context(closing(connected(running))) for _ in range(SCRAPERS + 1))
        os.kill(running.process.pid, signal.SIGSTOP)
        eventually(lambda: stat(running)[0] == "T", "it stands still")
        for client in crowd:
            client.sendall(question("/nowhere"))
        kubelet.sendall(question(path))
        os.kill(running.process.pid, signal.SIGCONT)

        at = answered(kubelet)
        assert at is not None
        late_count = sum((answered(client) or at) < at for client in crowd)

    assert late_count < SCRAPERS / 2, "one each is answered in turn"


def cpu_seconds(running: Daemon) -> float:
    return (int(stat(running)[11]) + int(stat(running)[12])) * TICK_SECONDS


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_the_page_of_one_sample_is_made_once_for_each_format_and_its_age_is_that_of_the_scrape(accept: str) -> None:
    """The CPU time of the daemon on the page is that of when the page was made."""
    with daemon(**ONE_SAMPLE) as running:
        running.sees(lambda page: page.has("engine_state"), "a first sample")
        shown, ages, began = set[str](), list[str](), cpu_seconds(running)

        def has_worked() -> bool:
            lines = running.get("/metrics", Accept=accept).text.splitlines()
            shown.update(line for line in lines if line.startswith("process_cpu_seconds_total "))
            ages.extend(line for line in lines if line.startswith("headroom_sample_age_seconds "))
            return cpu_seconds(running) > began + 5 * TICK_SECONDS

        eventually(has_worked, "scrapes cost some CPU time", every_seconds=0.0)

    assert len(shown) == 1
    assert len(set(ages)) == len(ages) > 1


def test_a_whole_address_is_asked_for_as_its_path() -> None:
    with daemon() as running:
        for address in ("http://x/healthz?x", "HTTPS://x:9839/healthz", "http://x?x", "http://x"):
            with closing(connected(running)) as client:
                client.sendall(question(address))
                assert client.recv(2**16).startswith(b"HTTP/1.1 200 OK\r\n"), address


@pytest.mark.parametrize("path", ["/", "/metrics", "/snapshot.json", "/healthz", "/gate/ready", "/nowhere"])
def test_what_is_said_is_not_kept_nor_taken_for_anything_else(path: str) -> None:
    with daemon() as running:
        headers = running.get(path).headers

    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert "Set-Cookie" not in headers
