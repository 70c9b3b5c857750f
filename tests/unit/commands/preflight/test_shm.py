import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.nvml.library import MIB, FakeGpu, FakeNvml
from tests.unit.commands.preflight.looking import Preflight, only
from vllm_headroom.model import Shm
from vllm_headroom.scrape.proc.host import read_shm
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest, check_shared_memory


def verdict(free: int, total: int) -> Conclusion | None:
    findings = list(check_shared_memory(Shm(total_bytes=total * MIB, free_bytes=free * MIB)))
    return findings[0].verdict if findings else None


def test_less_than_vllms_largest_queue_is_no_go_and_less_than_nccl_asks_for_is_a_remark() -> None:
    assert verdict(64, 64) is Conclusion.NOT_GOOD
    assert verdict(255, 255) is Conclusion.NOT_GOOD
    assert verdict(256, 256) is Conclusion.GOOD
    assert verdict(1023, 1024) is Conclusion.GOOD
    assert verdict(1024, 1024) is None


def test_a_large_one_that_is_full_is_cleaned_and_a_small_one_made_larger() -> None:
    (full,) = check_shared_memory(Shm(total_bytes=8192 * MIB, free_bytes=10 * MIB))
    (small,) = check_shared_memory(Shm(total_bytes=64 * MIB, free_bytes=64 * MIB))

    assert (
        full.text == "10 MiB of the 8192 MiB of /dev/shm are free, and vLLM needs 256 MiB free for tensor parallelism"
    )
    assert full.fix == "remove what a killed instance left there (vllm_*, psm_*, nccl-*); or --ignore shm"
    assert small.fix is not None
    assert "--shm-size=1g" in small.fix
    assert "emptyDir with medium: Memory" in small.fix


def test_a_machine_without_it_is_no_go_in_parallel_only(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus.append(FakeGpu(uuid="GPU-b"))
    nvml.write()
    preflight.shm = preflight.folder / "missing"
    parallel, wanted = MemoryRequest(utilization_ratio=0.92, tensor_parallel_size=2), GpuChoice(count=2)

    assert only(preflight.report(parallel, wanted)).kind is Kind.SHM
    assert preflight.report(parallel, wanted, {Kind.SHM}).verdict is Conclusion.GOOD
    assert preflight.report().verdict is Conclusion.GOOD


def test_the_size_is_that_of_the_file_system(tmp_path: Path) -> None:
    """In a separate mount namespace, so that a real tmpfs of 64 MiB, as Docker's, can be mounted."""
    code = "from pathlib import Path; from vllm_headroom_tools.preflight import look; print(look.read_shm(Path('SHM')))"
    mounted = subprocess.run(
        [
            "unshare",
            "--mount",
            "--map-root-user",
            "sh",
            "-c",
            f'mount -t tmpfs -o size=64m tmpfs "{tmp_path}" && "{sys.executable}" -c "$CODE"',
        ],
        env={**os.environ, "CODE": code.replace("SHM", str(tmp_path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr}")

    assert mounted.stdout == f"{Shm(total_bytes=64 * MIB, free_bytes=64 * MIB)}\n"
    assert read_shm(tmp_path / "missing") is None


def test_a_tier_of_the_kv_cache_that_an_earlier_run_left_stops_the_next_start(preflight: Preflight) -> None:
    """As vllm#51317 reports; with a vLLM that runs, the file is its own."""
    preflight.shm = preflight.folder / "shm"
    preflight.shm.mkdir()
    (preflight.shm / "psm_1").touch()
    assert preflight.report().verdict is Conclusion.GOOD

    leftover_file = preflight.shm / "vllm_offload_1.mmap"
    leftover_file.write_bytes(b"0" * MIB)
    finding = only(preflight.report())

    assert (finding.kind, finding.verdict) == (Kind.SHM, Conclusion.NOT_GOOD)
    assert finding.text.endswith(f"(vllm-project/vllm#51317): {leftover_file} (0.00 GiB)")
    assert finding.fix == f"remove them: rm {leftover_file}; or --ignore shm"
    assert preflight.report(ignored={Kind.SHM}).verdict is Conclusion.GOOD

    preflight.tree.add(20, 1, "vllm", "serve", "m")
    assert preflight.report().verdict is Conclusion.GOOD
