from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.fakes.cgroups import V2Tree
from tests.fakes.proc_tree import ProcTree
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.load.capacity import (
    STREAM_BYTES,
    TLS_STREAM_BYTES,
    UNLIMITED_DESCRIPTORS,
    check_capacity,
    list_limits,
    raise_descriptors,
)
from vllm_headroom_tools.load.command import COMMAND, read_order
from vllm_headroom_tools.load.run import count_streams

MIB = 2**20


OWN_PID = 9999


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 100 MiB available and 28,232 ports, and a container with 64 MiB left of 80, files left out."""
    proc = tmp_path / "proc"
    ports = proc / "sys/net/ipv4/ip_local_port_range"
    ports.parent.mkdir(parents=True)
    ports.write_text("32768\t60999\n")
    ProcTree(proc, own_pid=OWN_PID)
    (proc / "meminfo").write_text("MemTotal: 204800 kB\nMemAvailable:   102400 kB\n")
    contain(proc, 80 * MIB)
    return proc


def contain(proc: Path, limit: int | None) -> None:
    tree = V2Tree(proc.parent / f"cgroup-{limit}", proc)
    tree.add("pod/load", pids=(OWN_PID,), limit=limit, used=46 * MIB, file=30 * MIB)


def measure_limits(machine: Path, descriptors: int = 20_000, *, tls: bool = False) -> dict[str, int]:
    every = list_limits(descriptors, uses_tls=tls, proc=machine)
    assert every == sorted(every)
    return {name: streams for streams, name in every}


def test_what_ends_first_comes_first(machine: Path) -> None:
    every = measure_limits(machine)

    assert list(every) == ["memory", "ulimit -n 20000", "28232 local ports (net.ipv4.ip_local_port_range)"]
    assert every["memory"] == 64 * MIB // STREAM_BYTES
    assert 19_000 < every["ulimit -n 20000"] < 20_000 - 64
    assert every["28232 local ports (net.ipv4.ip_local_port_range)"] == 28_232


def test_encryption_takes_more_memory(machine: Path) -> None:
    assert measure_limits(machine, tls=True)["memory"] == 64 * MIB // TLS_STREAM_BYTES


def test_a_container_without_a_limit_has_the_machines_memory(machine: Path) -> None:
    contain(machine, None)

    assert measure_limits(machine)["memory"] == 100 * MIB // STREAM_BYTES


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert list(measure_limits(tmp_path)) == ["ulimit -n 20000"]


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
    try:
        raised = raise_descriptors()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert raised == (UNLIMITED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_streams_than_can_be_held_are_refused_with_what_ends_first() -> None:
    words = ["--engine-url", "http://127.0.0.1:8000", "--concurrency", "1000000"]
    concurrency = read_order(build_parser(COMMAND, "load").read(words)).concurrency

    with pytest.raises(
        BadInput,
        match=r"^--concurrency 1000000 needs 1200000 streams at once, and .+ allows \d+ in this process$",
    ):
        check_capacity(concurrency, count_streams(concurrency), uses_tls=False)
