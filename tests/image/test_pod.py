"""The sidecar beside an engine whose processes it sees. Run by `make image-test`."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu
from tests.image.containers import ALONE, HARDENED, Container, container, options
from tests.image.driver import ContainerDriver
from tests.image.pods import container_spec, pod, sidecar
from tests.process import Page, eventually

pytestmark = pytest.mark.image

TESTS: Final = Path(__file__).parents[1]
PAGE: Final = "contract/captures/vllm-0.32.0/load-waiting.prom"
VLLM_COMMAND: Final = ("python3", "/usr/local/bin/vllm", "serve", "--port", "8000")
VLLM_ENVIRONMENT: Final = {"PYTHONPATH": "/stand-in", "PAGE": f"/stand-in/tests/{PAGE}"}
VLLM_MOUNTS: Final = {TESTS: Path("/stand-in/tests"), TESTS / "image" / "vllm_stand_in.py": Path("/usr/local/bin/vllm")}

NOT_ON_THE_PAGE: Final = {"HEADROOM_KV_BYTES_PER_TOKEN": "131072", "HEADROOM_REPORTED_BYTES": "72GiB"}
GPUS: Final = ("GPU-0000", "GPU-1111")


@pytest.fixture
def driver(tmp_path: Path) -> ContainerDriver:
    return ContainerDriver(tmp_path, [FakeGpu(uuid=uuid, used_bytes=50 * GIB) for uuid in GPUS])


def test_the_sidecar_of_a_kubernetes_pod_attributes_by_process_and_its_doctor_misses_nothing(
    driver: ContainerDriver, tmp_path: Path
) -> None:
    vllm_spec = {"name": "vllm", "command": list(VLLM_COMMAND)}
    specs = [
        container_spec(vllm_spec, VLLM_ENVIRONMENT, VLLM_MOUNTS),
        container_spec(sidecar(), driver.environment | NOT_ON_THE_PAGE, driver.mounts),
    ]
    with pod(tmp_path, specs, *VLLM_MOUNTS, *driver.mounts) as containers:
        put_engine_on(GPUS[1], containers["vllm"], driver)

        check_attribution(containers["headroom"])
        assert "MISSING" not in containers["headroom"].run("vllm-headroom", "doctor")  # its exit status is 0, too


def test_a_sidecar_of_compose_outlives_the_engine_and_finds_its_next_processes(driver: ContainerDriver) -> None:
    with container("--init", "--entrypoint=sleep", ALONE, command=("infinity",)) as processes:
        joined = tuple(f"--{namespace}=container:{processes.name}" for namespace in ("network", "pid"))
        with container(*HARDENED, *joined, *options(driver.environment, driver.mounts)) as headroom:
            with engine(*joined) as vllm:
                put_engine_on(GPUS[1], vllm, driver)
                check_attribution(headroom)
            eventually(lambda: not headroom.page().has("engine_requests_running"), "the engine's end is seen")
            with engine(*joined) as vllm:
                put_engine_on(GPUS[1], vllm, driver)
                check_attribution(headroom)


def engine(*joined: str) -> AbstractContextManager[Container]:
    program, *arguments = VLLM_COMMAND
    stand_in = (f"--entrypoint={program}", *joined, *options(VLLM_ENVIRONMENT, VLLM_MOUNTS))
    return container(*stand_in, command=tuple(arguments))


def put_engine_on(uuid: str, vllm: Container, driver: ContainerDriver) -> None:
    """Let the driver say what one does from 565.57.01 on: the process's id in the namespace of who asks."""
    match = eventually(lambda: re.search(r"the engine core is process (\d+)", vllm.log()), "the engine starts")
    (gpu,) = (gpu for gpu in driver.fake.gpus if gpu.uuid == uuid)
    gpu.processes = {int(match[1]): 40 * GIB}
    driver.fake.write()


def check_attribution(headroom: Container) -> None:
    headroom.sampled()
    page = eventually(lambda: attributed(headroom.page()), "the engine's memory is found by its process")

    assert page.value("source_up", source="engine") == 1
    assert page.value("engine_requests_running", model_name="tiny") == 8
    assert page.value("gpu_info", uuid=GPUS[1], attribution="process") == 1
    assert page.value("gpu_info", uuid=GPUS[0], attribution="") == 1
    assert page.value("host_memory_bytes", process="api_server") > 0
    assert page.value("host_memory_bytes", process="engine_core") > 0


def attributed(page: Page) -> Page | None:
    holds = page.has("gpu_memory_held_bytes", uuid=GPUS[1], holder="engine")
    is_attributed = holds and page.value("gpu_memory_held_bytes", uuid=GPUS[1], holder="engine") == 40 * GIB
    return page if is_attributed and page.has("engine_requests_running") else None
