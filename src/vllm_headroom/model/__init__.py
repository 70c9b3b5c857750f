"""The data that flows through the daemon: frozen values whose names end in their unit."""

from vllm_headroom.model.engine import (
    INPUTS,
    SAME_START_SECONDS,
    Cgroup,
    EngineName,
    EngineOptions,
    EnginePage,
    EngineProcess,
    EngineReading,
    HangSign,
    HostMemory,
    HostReading,
    MachineMemory,
    Pool,
    ProcessName,
    ProcessReadings,
    ServerReply,
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
    ProbedProcess,
    ProbeReadings,
    ReadingTime,
    SchedulerReading,
    Vendor,
    find_part,
    name_device,
)
from vllm_headroom.model.peaks import (
    PeakReadings,
    SizePeak,
    StepAtError,
    StepFacts,
    WorkPeak,
    WorkPeaks,
)
from vllm_headroom.model.pod import ANY_LOG_COMMAND, USUAL_CONTAINER, EnginePod
from vllm_headroom.model.snapshot import (
    NO_VERDICT,
    Metric,
    Published,
    Sample,
    Snapshot,
    TokenBytes,
    Values,
    Verdict,
    find_worst,
)
from vllm_headroom.model.start import LogEnding, LogReading, find_log_ending
from vllm_headroom.model.status import (
    BudgetExcess,
    Diagnosis,
    Ending,
    EngineStatus,
    GpuAtEnd,
    Lost,
    StraightGrowth,
)
