"""Find how long clients of a server have waited, by the kernel's account of its connections."""

import socket
from collections.abc import Collection, Iterator
from itertools import product
from struct import Struct
from typing import Final

SLOW_SECONDS: Final = 40.0
"""An idle server answers sooner, although it may take 30 s to load a video (VLLM_VIDEO_FETCH_TIMEOUT)."""

# linux/netlink.h, sock_diag.h, inet_diag.h and tcp.h
_SOCK_DIAG, _BY_FAMILY, _DUMP, _ENDS, _ESTABLISHED, _TCP_INFO = 4, 20, 0x301, (2, 3), 1 << 1, 2
_QUESTION, _PORT, _MESSAGE, _ATTRIBUTE = (
    Struct("=IHHII BBBxI"),
    Struct(">H46x"),
    Struct("=IH"),
    Struct("=HH"),
)
_FIXED_BYTES: Final = 88
_DATA: Final = Struct("=48xI4xI64xQQ")
"""Milliseconds since data was last sent, and received; bytes acknowledged, and received."""


def find_wait(ports: Collection[int]) -> float | None:
    """Return how long the newest slow request to these ports has waited; None without one, or where it is unknown.

    A request waits on a connection that has received data since it last sent any, or at once and has sent none: one
    that is kept alive has sent last. The connections are those of this process's network.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            asked = product((socket.AF_INET, socket.AF_INET6), ports)
            waits = [wait for family, port in asked for wait in _list_waits(kernel, family, port)]
    except OSError:
        return None
    return min((wait for wait in waits if wait >= SLOW_SECONDS), default=None)


def _list_waits(kernel: socket.socket, family: int, port: int) -> Iterator[float]:
    """Yield the seconds that each request to a port has waited for."""
    about = (family, socket.IPPROTO_TCP, _TCP_INFO, _ESTABLISHED)
    kernel.send(
        _QUESTION.pack(_QUESTION.size + _PORT.size, _BY_FAMILY, _DUMP, 0, 0, *about)
        + _PORT.pack(port)
    )
    while True:
        for kind, message in _split(memoryview(kernel.recv(2**16)), _MESSAGE):
            if kind in _ENDS:
                return
            for name, info in _split(message[_FIXED_BYTES:], _ATTRIBUTE):
                sent, received, n_acked, n_received = (
                    _DATA.unpack_from(info) if name == _TCP_INFO else (0, 0, 0, 0)
                )
                if received < sent or (received == sent and n_received > n_acked == 0):
                    yield received / 1000


def _split(parts: memoryview, header: Struct) -> Iterator[tuple[int, memoryview]]:
    """Yield the kind and the bytes, header included, of each message or attribute."""
    while parts:
        size, kind = header.unpack_from(parts)
        yield kind, parts[:size]
        parts = parts[(size + 3) & ~3 :]
