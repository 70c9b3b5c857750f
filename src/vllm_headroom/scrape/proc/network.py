"""Read the addresses and listening ports of another process's network namespace."""

import ipaddress
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import split_kernel_lines

_LISTENING_STATE: Final = "0A"
"""TCP_LISTEN as written in net/tcp (linux/tcp_states.h)."""

_GLOBAL_SCOPE: Final = "00"
"""The scope in net/if_inet6 of an address that other machines can reach."""

_MAX_BYTES: Final = 2**20
"""The maximum number of bytes read from a file. The kernel lists listening sockets first. This
limit is enough for 7,000 listening sockets.
"""

_DEFAULT_DESTINATION: Final = "00000000"
"""The destination of the default route in net/route."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK: Final = ipaddress.IPv4Address("127.0.0.1")
"""The machine's address in its own network namespace."""

_ANY_ADDRESS: Final = frozenset({ipaddress.IPv4Address("0.0.0.0"), ipaddress.IPv6Address("::")})
"""The bind addresses of a socket that listens on every interface."""


class Network(Struct, frozen=True, kw_only=True):
    """A network namespace."""

    addresses: tuple[Address, ...]
    """The namespace's addresses, without loopback addresses. The most suitable address for reaching
    the namespace comes first.
    """
    listening: frozenset[tuple[Address, int]]
    """The addresses and ports on which something is listening. An address may be unspecified, such
    as 0.0.0.0.
    """

    @property
    def ports(self) -> frozenset[int]:
        """Return the ports on which something listens for clients outside this namespace."""
        return frozenset(port for address, port in self.listening if not address.is_loopback)

    def find_address(self, port: int, *, is_own: bool) -> Address | None:
        """Return an address at which this process can reach a port, or None.

        `is_own` indicates whether this is the network namespace of this process. Other namespaces
        cannot be reached through a loopback address. If nothing is listening yet, the server is
        expected to listen on all addresses.
        """
        bound = {address for address, bound_port in self.listening if bound_port == port}
        is_open = not bound or not bound.isdisjoint(_ANY_ADDRESS)
        if is_own:
            return LOOPBACK if is_open or LOOPBACK in bound else min(bound, key=str)
        if is_open:
            return self.addresses[0] if self.addresses else None
        reachable = [address for address in bound if not address.is_loopback]
        # The kernel does not sort the sockets. Choosing the lowest address gives the same result on
        # every call.
        return min(reachable, key=str, default=None)


def identify_network(proc: Path, pid: int) -> tuple[int, int] | None:
    """Return the device and inode that identify a process's network namespace, or None if unknown.

    The device and inode of net/stat are used. All users can read net/stat, unlike ns/net.
    """
    try:
        status = os.stat(f"{proc}/{pid}/net/stat")  # noqa: PTH116 - no Path per process
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read_network(proc: Path, pid: int) -> Network | None:
    """Return the network namespace of a process, or None if it cannot be read."""
    folder = proc / str(pid) / "net"
    try:
        addresses = _list_ipv4_addresses(_read(folder / "fib_trie"))
        listening = set(_list_listening(_read(folder / "tcp")))
    except OSError:
        return None
    routed_network = _find_routed_network(_read_optional(folder / "route"))
    # A pod may have additional interfaces that cannot be reached, for example for RDMA.
    if routed_network is not None:
        addresses.sort(key=lambda address: address not in routed_network)
    # On a machine without IPv6, the IPv6 files do not exist.
    listening.update(_list_listening(_read_optional(folder / "tcp6")))
    return Network(
        addresses=(*addresses, *_list_ipv6_addresses(_read_optional(folder / "if_inet6"))),
        listening=frozenset(listening),
    )


def _read(path: Path) -> list[str]:
    """Return the lines in a file's first _MAX_BYTES; raise OSError if it cannot be read."""
    with path.open("rb") as file:
        return split_kernel_lines(file.read(_MAX_BYTES).decode(errors="replace"))


def _read_optional(path: Path) -> list[str]:
    try:
        return _read(path)
    except OSError:
        return []


def _list_ipv4_addresses(lines: list[str]) -> list[Address]:
    """Return the local addresses in fib_trie, which lists each prefix before its kind."""
    addresses: dict[Address, None] = {}
    # Each leaf of the trie is followed by a line that contains its kind.
    for line, next_line in pairwise(lines):
        marker, _, text = line.strip().partition(" ")
        if marker != "|--" or next_line.split() != ["/32", "host", "LOCAL"]:
            continue
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            continue
        if not address.is_loopback:
            addresses[address] = None
    return list(addresses)


def _list_ipv6_addresses(lines: list[str]) -> Iterator[Address]:
    """Yield the addresses in if_inet6 that other machines can reach."""
    for line in lines:
        fields = line.split()
        if len(fields) < 4 or fields[3] != _GLOBAL_SCOPE:  # noqa: PLR2004 - its scope is field 4
            continue
        try:
            yield ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        except ValueError:
            continue


def _list_listening(lines: list[str]) -> Iterator[tuple[Address, int]]:
    """Yield the address and port of each listening socket in net/tcp or net/tcp6."""
    for line in lines:
        fields = line.split()
        if len(fields) < 4 or fields[3] != _LISTENING_STATE:  # noqa: PLR2004 - its state is field 4
            continue
        address_text, _, port_text = fields[1].partition(":")
        try:
            address = _parse_address(address_text)
            port = int(port_text, 16)
        except ValueError:
            continue
        # A dual-stack socket is listed with its IPv4 address in IPv6 notation.
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        yield address, port


def _parse_address(text: str) -> Address:
    """Parse an address as written in net/tcp: 32-bit words in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def _find_routed_network(lines: list[str]) -> ipaddress.IPv4Network | None:
    """Return the network of the interface with the default route, or None."""
    routes = [line.split() for line in lines[1:]]
    routes = [fields for fields in routes if len(fields) > 7]  # noqa: PLR2004 - its mask is field 8
    # Other machines reach this one through the interface with the default route.
    default_interfaces = {fields[0] for fields in routes if fields[1] == _DEFAULT_DESTINATION}
    for fields in routes:
        if fields[0] not in default_interfaces or fields[1] == _DEFAULT_DESTINATION:
            continue
        try:
            destination = _parse_address(fields[1])
            mask = _parse_address(fields[7])
            return ipaddress.IPv4Network(f"{destination}/{mask}")
        except ValueError:
            continue
    return None


def format_authority(address: Address, port: int) -> str:
    """Return an address and a port in URL notation."""
    if isinstance(address, ipaddress.IPv6Address):
        return f"[{address}]:{port}"
    return f"{address}:{port}"
