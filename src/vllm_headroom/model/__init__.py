"""The data that flows through the daemon: frozen values whose names end in their unit."""

from vllm_headroom.model.engine import (
    INPUTS,
    SAME_START_SECONDS,
    Cgroup,
    EnginePage,
    EngineProcess,
    EngineReading,
    HangSign,
    HostMemory,
    HostReading,
    MachineMemory,
    ProcessName,
    ProcessReadings,
    Shm,
)
from vllm_headroom.model.gpu import (
    AllocatorReading,
    Device,
    EngineParts,
    Failure,
    Fate,
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuReading,
    GpuReadings,
    Inside,
    Leftover,
    OomRecord,
    PoolReading,
    ProbedProcess,
    ProbeReadings,
    ReadingTime,
    SchedulerReading,
    Vendor,
    find_part,
    name_device,
)
from vllm_headroom.model.snapshot import NO_VERDICT, Metric, Published, Sample, Snapshot, Values, Verdict, find_worst
from vllm_headroom.model.status import Diagnosis, Ending, EngineStatus, GpuAtEnd, Lost
