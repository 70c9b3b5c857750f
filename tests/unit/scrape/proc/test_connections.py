"""A request that waits is distinguished from every other connection, by the kernel's own account."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.process import eventually
from vllm_headroom.scrape.proc import connections
from vllm_headroom.scrape.proc.connections import count_lasting_waits, find_slow_wait, list_waits, list_waits_by_port

SLOW_SECONDS = 0.05


def find_wait(ports: Collection[int]) -> float | None:
    """Return how long the newest slow request has waited, None also where connections are not visible."""
    return find_slow_wait(list_waits(ports) or ())


JIFFY_SECONDS = 0.01
"""The longest tick of a kernel's clock."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOW_REQUEST_SECONDS", SLOW_SECONDS)


class Wire:
    """A client's connection to a server on loopback, from both ends."""

    def __init__(self, listening: socket.socket, host: str) -> None:
        self.listening, self.host = listening, host
        self.port = int(listening.getsockname()[1])
        self.client = socket.create_connection((host, self.port))
        self.server = listening.accept()[0]

    def ask(self) -> None:
        self.client.sendall(b"GET / HTTP/1.1\r\n\r\n")

    def answer(self) -> None:
        assert self.server.recv(100)
        self.server.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert self.client.recv(100)

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def waits(self) -> float:
        """Return how long its request waits, once that is slow; fail if it never is."""
        return eventually(lambda: find_wait({self.port}), "a request waits")


@pytest.fixture(params=[("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")], ids=" from ".join)
def wires(request: pytest.FixtureRequest) -> Iterator[list[Wire]]:
    """Return two connections to one server, which listens for IPv4, for IPv6 or for both."""
    address, host = request.param
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family is socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with ExitStack() as stack:
        listening = socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::")
        stack.enter_context(listening)
        pair = [Wire(listening, host) for _ in range(2)]
        for wire in pair:
            stack.enter_context(closing(wire))
        yield pair


def test_only_a_request_without_an_answer_waits(wires: list[Wire]) -> None:
    """Whatever else is open when the slow request is seen has been there for longer."""
    kept_alive, asking = wires
    kept_alive.ask()
    kept_alive.answer()
    assert find_wait({kept_alive.port}) is None

    asking.ask()
    first_wait_seconds = asking.waits()
    assert first_wait_seconds >= SLOW_SECONDS
    asking.answer()
    assert find_wait({asking.port}) is None

    kept_alive.ask()
    assert kept_alive.waits() >= SLOW_SECONDS
    kept_alive.client.close()
    eventually(lambda: find_wait({asking.port}) is None, "the client has gone")


def test_the_newest_slow_request_counts_and_only_of_these_ports(
    wires: list[Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = wires
    older.ask()
    older.waits()
    monkeypatch.setattr(connections, "SLOW_REQUEST_SECONDS", 0.0)
    asked_seconds = time.monotonic()
    newer.ask()
    waited = find_wait({1, newer.port})

    assert waited is not None
    assert waited <= time.monotonic() - asked_seconds + JIFFY_SECONDS
    assert find_wait(()) is None
    assert find_wait({1}) is None


def test_a_connection_that_asks_at_once_waits_too(wires: list[Wire]) -> None:
    """Within one tick of the kernel's clock: most clients on the same machine do."""
    for _ in range(20):
        with closing(Wire(wires[0].listening, wires[0].host)) as wire:
            wire.ask()
            assert wire.waits() >= SLOW_SECONDS


def test_a_request_counts_as_waiting_once_it_is_no_passing_one(
    wires: list[Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_wire, second = wires
    assert count_lasting_waits(list_waits({first_wire.port}) or ()) == 0

    first_wire.ask()
    second.ask()
    assert count_lasting_waits((0.5, 1.0, 99.0)) == 2
    monkeypatch.setattr(connections, "PASSING_SECONDS", SLOW_SECONDS)
    eventually(lambda: count_lasting_waits(list_waits({first_wire.port}) or ()) == 2, "both wait")


def test_the_requests_of_all_ports_are_read_at_once(wires: list[Wire]) -> None:
    first_wire, second = wires
    first_wire.ask()
    second.ask()
    assert first_wire.waits() >= SLOW_SECONDS
    by_port = list_waits_by_port()

    assert by_port is not None
    assert len(by_port[first_wire.port]) == 2
    assert max(by_port[first_wire.port]) >= SLOW_SECONDS


def test_a_kernel_that_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError

    monkeypatch.setattr(socket, "socket", refuse)

    assert find_wait({80}) is None
    assert list_waits_by_port() is None
