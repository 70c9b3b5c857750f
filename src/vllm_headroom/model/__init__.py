"""The facts that flow through the daemon: frozen values whose names end in their unit."""

from vllm_headroom.model.engine import (
    INPUTS,
    SAME_START_SECONDS,
    EnginePage,
    EngineProcess,
    EngineReading,
    Life,
    ProcessName,
    ProcessReadings,
)
from vllm_headroom.model.gpu import (
    Device,
    Fate,
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuReading,
    GpuReadings,
    Leftover,
    Vendor,
    called,
    part_of,
)
from vllm_headroom.model.host import Cgroup, HostMemory, HostReading, MachineMemory, Shm
from vllm_headroom.model.inside import (
    AllocatorReading,
    EngineParts,
    HostBlock,
    Inside,
    OomRecord,
    PoolReading,
    ProbedProcess,
    ProbeReadings,
    SchedulerReading,
)
from vllm_headroom.model.reading import Failure, ReadingTime
from vllm_headroom.model.sample import Metric, Published, Sample, Values, Verdict, worst
from vllm_headroom.model.snapshot import Snapshot
