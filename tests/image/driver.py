"""A driver for containers: the fake NVML library where the NVIDIA runtime mounts the real one."""

from __future__ import annotations

import platform
from pathlib import Path

from tests.fakes.nvml.library import SONAME, FakeGpu, FakeNvml


class ContainerDriver:
    """What the driver says is in `fake`; `mounts` maps paths of this machine to paths in a container."""

    def __init__(self, folder: Path, gpus: list[FakeGpu]) -> None:
        folder.chmod(0o755)
        self.fake = FakeNvml(folder, gpus)
        environment = self.fake.environment()
        library = Path(environment.pop("LD_LIBRARY_PATH")) / SONAME
        self.environment = environment
        self.mounts = {library: Path(f"/usr/lib/{platform.machine()}-linux-gnu/{SONAME}"), folder: folder}
