"""Determine from the kernel's connection data how long a server's clients have been waiting."""

import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from struct import Struct
from typing import Final

SLOW_REQUEST_SECONDS: Final = 40.0
"""A request that has been waiting for at least this long is slow. An idle server responds sooner.
Even loading a video takes at most 30 s (VLLM_VIDEO_FETCH_TIMEOUT).
"""

PASSING_SECONDS: Final = 1.0
"""Within this time, a healthy server answers a health check or scrape, or rejects a request."""

# The kernel's sock_diag protocol: linux/netlink.h, sock_diag.h, inet_diag.h and tcp.h.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_DUMP_FLAGS: Final = 0x301
"""NLM_F_REQUEST and NLM_F_DUMP: list all sockets."""
_END_KINDS: Final = (2, 3)
"""NLMSG_ERROR and NLMSG_DONE: no further message follows."""
_ESTABLISHED_STATES: Final = 1 << 1
"""A bit mask of TCP states that contains only TCP_ESTABLISHED."""
_INET_DIAG_INFO: Final = 2
"""The attribute that contains a socket's tcp_info."""

_REQUEST: Final = Struct("=IHHII BBBxI")
"""A message header: size, kind, flags, sequence, port. The header is followed by the start of
inet_diag_req_v2: family, protocol, attributes and states.
"""
_SOCKET_ID: Final = Struct(">H46x")
"""The rest of the request: the server's port, any address and any peer."""
_ANY_PORT: Final = 0
"""The port in a request for the connections of all ports."""
_LOCAL_PORT: Final = Struct(">20xH")
"""The field of a message that contains the connection's local port."""
_MESSAGE_HEADER: Final = Struct("=IH")
_ATTRIBUTE_HEADER: Final = Struct("=HH")
_FIXED_BYTES: Final = 88
"""The size of the part of a message before its attributes."""
_TCP_INFO: Final = Struct("=48xI4xI64xQQ")
"""Four fields of tcp_info. The first two are the milliseconds since data was last sent and
received. The others are the bytes acknowledged and received.
"""

_RECEIVE_BYTES: Final = 2**16


def list_waits(ports: Collection[int]) -> tuple[float, ...] | None:
    """Return how many seconds each request to these ports has been waiting.

    A request is waiting if its connection has received data since it last sent data. An idle
    keep-alive connection has sent its response after the request, so it has no waiting request.
    Only connections in this process's network namespace are listed. Returns None if the kernel does
    not list connections.
    """
    waits = _read_waits(ports)
    return None if waits is None else tuple(seconds for _, seconds in waits)


def list_waits_by_port() -> Mapping[int, tuple[float, ...]] | None:
    """Return the result of `list_waits` for each port with waiting requests, or None if unknown."""
    waits = _read_waits((_ANY_PORT,))
    if waits is None:
        return None
    by_port: defaultdict[int, list[float]] = defaultdict(list)
    for port, seconds in waits:
        by_port[port].append(seconds)
    return {port: tuple(waits_seconds) for port, waits_seconds in by_port.items()}


def _read_waits(ports: Collection[int]) -> list[tuple[int, float]] | None:
    """Return each waiting request's port and wait in seconds, or None if unknown."""
    waits: list[tuple[int, float]] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            for family in (socket.AF_INET, socket.AF_INET6):
                for port in ports:
                    waits += _list_waits(kernel, family, port)
    except OSError:
        return None
    return waits


def find_slow_wait(waits_seconds: Collection[float]) -> float | None:
    """Return the wait of the newest slow request in seconds.

    Returns None if no request is slow.
    """
    return min((wait for wait in waits_seconds if wait >= SLOW_REQUEST_SECONDS), default=None)


def count_lasting_waits(waits_seconds: Collection[float]) -> int:
    """Return how many requests have been waiting for at least PASSING_SECONDS."""
    return sum(wait >= PASSING_SECONDS for wait in waits_seconds)


def _list_waits(kernel: socket.socket, family: int, port: int) -> Iterator[tuple[int, float]]:
    """Yield the port of each waiting request, and how many seconds it has been waiting.

    Only requests to `port` are listed, unless it is _ANY_PORT. `family` is the address family of
    IPv4 or IPv6. Raises OSError if the kernel does not list connections.
    """
    # The message requests all established TCP sockets of the port, with their TCP_INFO
    # (sock_diag(7)).
    size = _REQUEST.size + _SOCKET_ID.size
    request = _REQUEST.pack(
        size,
        _SOCK_DIAG_BY_FAMILY,
        _DUMP_FLAGS,
        0,
        0,
        family,
        socket.IPPROTO_TCP,
        _INET_DIAG_INFO,
        _ESTABLISHED_STATES,
    )
    kernel.send(request + _SOCKET_ID.pack(port))
    while True:
        received = memoryview(kernel.recv(_RECEIVE_BYTES))
        for kind, message in _split_parts(received, _MESSAGE_HEADER):
            if kind in _END_KINDS:
                return
            (local_port,) = _LOCAL_PORT.unpack_from(message)
            for attribute, content in _split_parts(message[_FIXED_BYTES:], _ATTRIBUTE_HEADER):
                if attribute != _INET_DIAG_INFO:
                    continue
                sent_ago, received_ago, acked_bytes, received_bytes = _TCP_INFO.unpack_from(content)
                # The two times may be equal, as at the start of a connection. Equal times do not
                # show whether the connection received or sent data last. In that case, a connection
                # that has only received data has a waiting request.
                has_only_received = received_bytes > 0 and acked_bytes == 0
                is_waiting = received_ago < sent_ago
                if is_waiting or (received_ago == sent_ago and has_only_received):
                    yield local_port, received_ago / 1000


def _split_parts(parts: memoryview, header: Struct) -> Iterator[tuple[int, memoryview]]:
    """Yield the kind and the bytes of each message or attribute in a sequence.

    The bytes include the header, which contains the size and the kind.
    """
    while parts:
        size, kind = header.unpack_from(parts)
        yield kind, parts[:size]
        # Each part of the message starts at a multiple of four bytes.
        aligned_size = (size + 3) & ~3
        parts = parts[aligned_size:]
