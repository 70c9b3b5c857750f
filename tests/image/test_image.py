"""The image as a container that the manifests would make of it. Run by `make image-test`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu
from tests.image.containers import ALONE, HARDENED, IMAGE, Container, container, containers, options
from tests.image.driver import ContainerDriver

pytestmark = pytest.mark.image

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
STATE = "/var/lib/vllm-headroom"
NO_SHELL = ("--volume=/dev/null:/usr/bin/dash:ro", "--volume=/dev/null:/usr/bin/bash:ro")


@pytest.fixture(scope="module")
def hardened() -> Iterator[Container]:
    with container(*HARDENED, ALONE) as running:
        running.sampled()
        yield running


def test_it_runs_as_nobody_with_no_capability_and_no_way_to_one(hardened: Container) -> None:
    lines = hardened.python("print(open('/proc/1/status').read())").splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}

    assert status["Uid"] == ["65532"] * 4
    assert status["Gid"] == ["65532"] * 4
    assert (status["CapEff"], status["CapBnd"]) == (["0" * 16], ["0" * 16])
    assert status["NoNewPrivs"] == ["1"]


def test_it_serves_on_a_read_only_root(hardened: Container) -> None:
    page = hardened.page()

    assert hardened.inspect()["HostConfig"]["ReadonlyRootfs"] is True
    assert page.value("build_info", version=PROJECT["version"], revision="image-test") == 1
    assert page.value("source_up", source="engine") == 0  # there is none, and that is what the page is for
    assert hardened.get("/healthz")[0] == 200


def test_its_start_compiles_no_module() -> None:
    with container(*HARDENED, ALONE, "--env=PYTHONVERBOSE=1") as running:
        running.sampled()
        loaded = re.findall(r"# code object from '(.+)'", running.log())

    assert len(loaded) > 400
    assert [path for path in loaded if not path.endswith(".pyc")] == []


def test_it_needs_no_shell() -> None:
    with container(*HARDENED, ALONE, *NO_SHELL) as running:
        running.sampled()

        assert running.python("import os; print(os.access('/bin/sh', os.X_OK))").strip() == "False"
        assert running.get("/healthz")[0] == 200


def test_as_process_1_it_ends_on_sigterm_within_a_second() -> None:
    with container(*HARDENED, ALONE) as running:
        running.sampled()
        status, seconds = running.stop()

    print(f"from SIGTERM to the end: {seconds:.2f} s")  # noqa: T201 - a measurement, shown by make image-test
    assert status == 0
    assert seconds < 5  # a second is the claim; a busy machine may take longer to notice it


def test_with_the_driver_s_library_where_the_nvidia_runtime_puts_it_there_are_gpu_series(tmp_path: Path) -> None:
    driver = ContainerDriver(tmp_path, [FakeGpu(uuid="GPU-1111", used_bytes=40 * GIB)])

    with container(*HARDENED, ALONE, *options(driver.environment, driver.mounts)) as running:
        running.sampled()
        page = running.page()

    assert page.value("source_up", source="nvml") == 1
    assert page.value("gpu_memory_used_bytes", gpu="0", uuid="GPU-1111") == 40 * GIB


def test_a_new_volume_for_its_state_belongs_to_it() -> None:
    with container(*HARDENED, ALONE, f"--volume={STATE}", f"--env=HEADROOM_STATE_DIR={STATE}") as running:
        running.sampled()

        assert running.python(f"import os; print(os.access('{STATE}', os.W_OK))").strip() == "True"


def test_its_labels_say_what_it_is() -> None:
    (facts,) = json.loads(containers("image", "inspect", IMAGE))
    config = facts["Config"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}

    assert labels["title"] == PROJECT["name"]
    assert labels["version"] == PROJECT["version"]
    assert labels["revision"] == "image-test"
    assert labels["licenses"] == PROJECT["license"]
    assert config["User"] == "65532:65532"
    assert "9839/tcp" in config["ExposedPorts"]
    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in config["Env"]
    assert not [variable for variable in config["Env"] if variable.startswith("NVIDIA_VISIBLE_DEVICES")]
