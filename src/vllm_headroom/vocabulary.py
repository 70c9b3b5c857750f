"""The closed sets of label values."""

from enum import StrEnum
from typing import Final, Self


class Source(StrEnum):
    """The source of a reading; the values of the label `source`."""

    ENGINE = "engine"
    NVML = "nvml"
    PROCESS = "process"
    PROBE = "probe"
    LOG = "log"


class Reason(StrEnum):
    """Why a reading failed; the values of the label `reason`, a closed set."""

    UNREACHABLE = "unreachable"
    NAME_RESOLUTION = "name_resolution"
    TIMEOUT = "timeout"
    TLS = "tls"
    REDIRECT = "redirect"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    HTTP_STATUS = "http_status"
    TOO_LARGE = "too_large"
    INCOMPLETE = "incomplete"
    NOT_METRICS = "not_metrics"
    MALFORMED = "malformed"
    OUT_OF_BOUNDS = "out_of_bounds"
    CREDENTIALS = "credentials"
    LIBRARY_MISSING = "library_missing"
    DRIVER_MISSING = "driver_missing"
    VERSION_MISMATCH = "version_mismatch"
    NO_PERMISSION = "no_permission"
    NO_DEVICES = "no_devices"
    DEVICE_LOST = "device_lost"
    UNKNOWN = "unknown"
    DRIVER_ERROR = "driver_error"
    UNAVAILABLE = "unavailable"
    UNEXPECTED = "unexpected"


REASONS: Final[dict[Source, tuple[Reason, ...]]] = {
    Source.ENGINE: (
        Reason.UNREACHABLE,
        Reason.NAME_RESOLUTION,
        Reason.TIMEOUT,
        Reason.TLS,
        Reason.REDIRECT,
        Reason.UNAUTHORIZED,
        Reason.NOT_FOUND,
        Reason.HTTP_STATUS,
        Reason.TOO_LARGE,
        Reason.INCOMPLETE,
        Reason.NOT_METRICS,
        Reason.MALFORMED,
        Reason.OUT_OF_BOUNDS,
        Reason.CREDENTIALS,
        Reason.UNAVAILABLE,
        Reason.UNEXPECTED,
    ),
    Source.NVML: (
        Reason.LIBRARY_MISSING,
        Reason.DRIVER_MISSING,
        Reason.VERSION_MISMATCH,
        Reason.NO_PERMISSION,
        Reason.NO_DEVICES,
        Reason.DEVICE_LOST,
        Reason.TIMEOUT,
        Reason.UNKNOWN,
        Reason.DRIVER_ERROR,
        Reason.UNAVAILABLE,
        Reason.UNEXPECTED,
    ),
    Source.PROCESS: (
        Reason.UNAVAILABLE,
        Reason.TIMEOUT,
        Reason.UNEXPECTED,
    ),
    Source.PROBE: (
        Reason.UNAVAILABLE,
        Reason.NO_PERMISSION,
        Reason.NOT_FOUND,
        Reason.MALFORMED,
        Reason.OUT_OF_BOUNDS,
        Reason.TIMEOUT,
        Reason.UNEXPECTED,
    ),
    Source.LOG: (
        Reason.UNREACHABLE,
        Reason.NAME_RESOLUTION,
        Reason.TIMEOUT,
        Reason.TLS,
        Reason.UNAUTHORIZED,
        Reason.NO_PERMISSION,
        Reason.NOT_FOUND,
        Reason.HTTP_STATUS,
        Reason.TOO_LARGE,
        Reason.INCOMPLETE,
        Reason.MALFORMED,
        Reason.OUT_OF_BOUNDS,
        Reason.CREDENTIALS,
        Reason.UNAVAILABLE,
        Reason.UNEXPECTED,
    ),
}
"""The reasons why reading each source can fail. For each reason, `headroom_source_failures_total`
starts at 0.
"""


class Attribution(StrEnum):
    """How a GPU was assigned to the engine; the values of the label `attribution`."""

    PROCESS = "process"
    UUID = "uuid"
    SINGLE = "single"
    ASSUMED = "assumed"


class Role(StrEnum):
    """The role of an engine's process; the values of the label `process`."""

    API_SERVER = "api_server"
    ENGINE_CORE = "engine_core"
    WORKER = "worker"
    OTHER = "other"


NECESSARY_ROLES: Final = (Role.ENGINE_CORE, Role.WORKER)
"""If one of these processes is missing, the server cannot serve requests. The server's page may
still remain available for half a minute or indefinitely.
"""


class EngineKind(StrEnum):
    """What a daemon does with an engine on its machine.

    The values are those of the label `kind`.
    """

    WATCHED = "watched"
    OWN_SIDECAR = "own_sidecar"
    """The engine is watched by its own sidecar."""
    UNREADABLE = "unreadable"
    """The engine's page cannot be found or reached."""


class HostBasis(StrEnum):
    """The basis of the engine's host-memory figures, most reliable first."""

    CGROUP = "cgroup"
    MACHINE = "machine"
    PROBE = "probe"
    PROCESSES = "processes"


class EngineState(StrEnum):
    """The state of the server as a whole; the values of the label `state`."""

    UNKNOWN = "unknown"
    DOWN = "down"
    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    ASLEEP = "asleep"


class ExitReason(StrEnum):
    """The known cause of an engine's exit.

    The values are those of the label `reason`.
    """

    REPLACED = "replaced"
    GONE = "gone"
    OUT_OF_MEMORY = "out_of_memory"
    OOM_KILLED = "oom_killed"
    STOPPED = "stopped"
    OVER_BUDGET = "over_budget"


class EvictionResult(StrEnum):
    """The result of an eviction requested by the sidecar; the values of the label `result`."""

    DRY_RUN = "dry_run"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"


class ServerAnswer(StrEnum):
    """How the engine's server responds to requests for paths other than its metrics page."""

    HEALTHY = "healthy"
    """`/health` returns 200. Where `/health` does not exist, either `/v1/models` or `/load` returns
    200.
    """

    UNHEALTHY = "unhealthy"
    """`/health` reports an error in the server, as vLLM's does once its engine has died."""

    SILENT = "silent"
    """Nothing answers."""

    UNCLEAR = "unclear"
    """The response does not show whether the server is healthy. The response may be a login page.
    """


class IncidentKind(StrEnum):
    """What happened to the engine."""

    ENDED = "ended"
    STALLED = "stalled"


class EndCause(StrEnum):
    """The cause of an exit or a stall; a closed set, for use in scripts."""

    LEAK = "out_of_memory_leak"
    BURST = "out_of_memory_burst"
    NEIGHBOUR = "out_of_memory_neighbour"
    OVER_BUDGET = "over_budget"
    KILLED = "killed_by_kernel"
    NEVER_FITTED = "start_never_fitted"
    HANG = "hang"
    CRASH = "crash"
    STOPPED = "orderly_end"
    IDLE = "ended_while_idle"
    UNKNOWN = "unknown"
    NOTHING = "nothing_ended"


class Sureness(StrEnum):
    """How certain a cause is.

    The values mean "nothing else fits", "it fits best" and "it cannot be excluded".
    """

    SURE = "sure"
    LIKELY = "likely"
    POSSIBLE = "possible"


class HostPart(StrEnum):
    """What vLLM may be configured to keep in host memory; values of the label `part`."""

    KV_OFFLOAD = "kv_offload"
    WEIGHTS_OFFLOAD = "weights_offload"
    MULTIMODAL_CACHE = "multimodal_cache"


class MemoryPart(StrEnum):
    """What the engine uses GPU memory for; the values of the label `part`."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPHS = "cuda_graphs"
    OTHER_TENSORS = "other_tensors"
    FRAGMENTED = "fragmented"
    CACHED = "cached"
    OUTSIDE_TORCH = "outside_torch"


class Work(StrEnum):
    """The kinds of work that the engine's steps do; the values of the label `work`."""

    PREFILL = "prefill"
    DECODE = "decode"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ENCODER = "encoder"
    SAMPLING = "sampling"
    ADAPTER = "adapter"
    OTHER = "other"


class StartPart(StrEnum):
    """What uses GPU memory according to the engine's startup log; values of the label `part`."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    NON_TORCH = "non_torch"
    CUDA_GRAPHS = "cuda_graphs"
    KV_CACHE = "kv_cache"


class LeakLocation(StrEnum):
    """Where memory grows; the values of the label `location`."""

    TENSORS = "tensors"
    FRAGMENTATION = "fragmentation"
    OUTSIDE_TORCH = "outside_torch"


class LeakState(StrEnum):
    """The leak detector's state for one series; the values of the label `state`."""

    UNKNOWN = "unknown"
    WARMING_UP = "warming_up"
    UNSETTLED = "unsettled"
    STABLE = "stable"
    GROWING = "growing"
    LEAKING = "leaking"
    ASLEEP = "asleep"


GROWING_STATES: Final = (LeakState.LEAKING, LeakState.GROWING)
"""The states in which memory grows, either for certain or as an early warning."""


class Level(StrEnum):
    """The severity of a verdict, with the worst last."""

    GOOD = "good"
    UNKNOWN = "unknown"
    WARNING = "warning"
    ALARM = "alarm"


class Situation(StrEnum):
    """The situation of the engine and its GPUs, worst first.

    `action` is what to do first.
    """

    action: str

    def __new__(cls, name: str, action: str = "") -> Self:
        """Return the situation with this name."""
        situation = str.__new__(cls, name)
        situation._value_ = name
        situation.action = action
        return situation

    CRASH_LOOP = "crash_loop", "Read the last incident: it has the cause of the exits."
    DOWN = "down", "Read the engine's log, and the last incident."
    STALLED = (
        "stalled",
        "Send one request. Without an answer, move traffic away and restart the engine.",
    )
    LEAKING = (
        "leaking",
        "Plan a restart before the earliest time, and keep the figures for a bug report.",
    )
    HOST_LEAK = (
        "host_leak",
        "Plan a restart before the earliest time, and keep the figures for a bug report.",
    )
    LOW_MEMORY = "low_memory", "Reduce the load, or restart with a lower --gpu-memory-utilization."
    OVER_BUDGET = (
        "over_budget",
        "Restart with a lower --gpu-memory-utilization at the next quiet hour.",
    )
    NEIGHBOUR = "neighbour", "Find the other process on the GPU, and move it if it was not planned."
    GROWING = (
        "growing",
        "Look at it in working hours: caches that fill look the same until they are full.",
    )
    STRANDED = (
        "stranded",
        "Restart the engine while no request runs, as now; drain it first if some come.",
    )
    BLIND = (
        "blind",
        "Check that the engine answers. Then vllm-headroom doctor names what cannot be read.",
    )
    FILLING = "filling", "Nothing: a pool that was configured fills up to its bound."
    STARTING = "starting", "Wait until it serves."
    ASLEEP = "asleep", "Nothing."
    HEALTHY = "healthy", "Nothing."


LEVEL_NAMES: Final = {
    Level.GOOD: "OK",
    Level.UNKNOWN: "NOT KNOWN",
    Level.WARNING: "WARNING",
    Level.ALARM: "ALARM",
}
"""The levels as shown on the page and in the terminal."""


class MetricType(StrEnum):
    """A Prometheus metric type."""

    GAUGE = "gauge"
    COUNTER = "counter"


_CONTROL_CODES: Final = (*range(32), *range(127, 160))
_LINE_BREAK_CODES: Final = (0x2028, 0x2029)
_DIRECTION_CODES: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))

CONTROLS: Final = {
    code: f"\\x{code:02x}" for code in (*_CONTROL_CODES, *_LINE_BREAK_CODES, *_DIRECTION_CODES)
}
"""Characters that could control a terminal, break a line or reorder text, with replacements."""


class StartPhase(StrEnum):
    """How far an engine's start has progressed, in order."""

    BEGINNING = "beginning"
    LOADING = "loading"
    PROFILING = "profiling"
    CACHE = "cache"
    READY = "ready"
    SERVING = "serving"


class LogEventKind(StrEnum):
    """What a line in the engine's log is about."""

    START = "start"
    ARGUMENTS = "arguments"
    FIGURES = "figures"
    SERVING = "serving"
    LOAD = "load"
    REMARK = "remark"
    FAILURE = "failure"
    STOP = "stop"


class LogRemarkKind(StrEnum):
    """Warnings from an engine that are relevant to its memory."""

    PREEMPTION = "preemption"
    SWAP = "swap"
    FALLBACK = "fallback"
    EAGER = "eager"
    PADDING = "padding"
    CONTEXT_REDUCED = "context_reduced"
    BLOCKED = "blocked"


class LogFailureKind(StrEnum):
    """The kinds of failures that an engine's log reports."""

    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    NO_KV_CACHE_MEMORY = "no_kv_cache_memory"
    CONTEXT_TOO_LONG = "context_too_long"
    TOO_FEW_STATE_BLOCKS = "too_few_state_blocks"
    LITTLE_FREE_MEMORY = "little_free_memory"
    MEMORY_CHANGED = "memory_changed"
    BLOCK_BEYOND_BATCH = "block_beyond_batch"
    CONTEXT_BEYOND_MODEL = "context_beyond_model"
    MODEL_UNAVAILABLE = "model_unavailable"
    TOO_FEW_GPUS = "too_few_gpus"
    NCCL = "nccl"
    SHARED_MEMORY = "shared_memory"
    CUDA = "cuda"
    DRIVER = "driver"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    KILLED = "killed"
    HANG = "hang"
    DISK_FULL = "disk_full"
    PORT_IN_USE = "port_in_use"
    UNSUPPORTED = "unsupported"
    BAD_OPTION = "bad_option"
    EXCEPTION = "exception"
    ENGINE_DIED = "engine_died"
