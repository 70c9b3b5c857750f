"""Every exported metric, in the order in which the page lists them."""

from typing import Final

from vllm_headroom.model import Metric
from vllm_headroom.vocabulary import MetricType

GPU_LABELS: Final = ("gpu", "uuid")
"""The labels of a series for one GPU."""

ENGINE_LABELS: Final = ("model_name", "engine")
"""The labels of a series for one engine, which is one data-parallel rank."""

LIVE_SHARE: Final = ("running", "kv_used_ratio")
"""The facts that determine how much of the KV cache a request uses."""

LIVE_TOKENS: Final = (*LIVE_SHARE, "kv_capacity_tokens")
"""The facts that are needed to compute a size per request in tokens or bytes."""


_declared: Final[list[Metric]] = []


def _declare_gauge(
    name: str, labels: tuple[str, ...], text: str, *, needs: tuple[str, ...] = ()
) -> Metric:
    """Declare the next metric on the page, `headroom_<name>`."""
    metric = Metric(
        name=f"headroom_{name}", kind=MetricType.GAUGE, labels=labels, help=text, needs=needs
    )
    _declared.append(metric)
    return metric


def _declare_counter(name: str, labels: tuple[str, ...], text: str) -> Metric:
    """Declare the next metric on the page, `headroom_<name>_total`."""
    metric = Metric(
        name=f"headroom_{name}_total", kind=MetricType.COUNTER, labels=labels, help=text
    )
    _declared.append(metric)
    return metric


# The metrics below are in the order in which the page lists them. Each declaration also adds the
# metric to METRICS.

BUILD_INFO: Final = _declare_gauge(
    "build_info",
    ("version", "revision", "python_version"),
    "The daemon's version and the Python it runs on; always 1.",
)
SOURCE_UP: Final = _declare_gauge(
    "source_up", ("source",), "1 when the last reading of this source succeeded, else 0."
)
SOURCE_READ_SECONDS: Final = _declare_gauge(
    "source_read_seconds", ("source",), "Duration of the last reading of this source."
)
SOURCE_FAILURES: Final = _declare_counter(
    "source_failures", ("source", "reason"), "Readings of this source that failed, by reason."
)
SOURCE_LAST_SUCCESS: Final = _declare_gauge(
    "source_last_success_timestamp_seconds",
    ("source",),
    "When this source was last read successfully, in seconds since the epoch.",
)
SAMPLE_AGE: Final = _declare_gauge(
    "sample_age_seconds", (), "Age of the published sample at the time of the scrape."
)
SAMPLE_SKEW: Final = _declare_gauge(
    "sample_skew_seconds",
    (),
    "Time between the engine reading and the GPU reading of the published sample.",
)
INPUT_AVAILABLE: Final = _declare_gauge(
    "input_available", ("input",), "1 when the engine's page offers this input, 0 when it does not."
)

ENGINES: Final = _declare_gauge(
    "engines",
    ("kind",),
    "Engines of this machine: watched, left to their own sidecar, or unreadable; absent where one"
    " engine is watched.",
)

GPU_INFO: Final = _declare_gauge(
    "gpu_info",
    ("gpu", "uuid", "name", "attribution"),
    "A GPU; attribution is how it was assigned to the engine, empty when it is not the engine's.",
)
GPU_UP: Final = _declare_gauge(
    "gpu_up", GPU_LABELS, "1 when this device can be read, 0 when it is lost or does not answer."
)
GPU_MEMORY_TOTAL: Final = _declare_gauge(
    "gpu_memory_total_bytes", GPU_LABELS, "Memory of the device."
)
GPU_MEMORY_USED: Final = _declare_gauge(
    "gpu_memory_used_bytes",
    GPU_LABELS,
    "Memory in use on the device by any process, without what the driver reserves.",
)
GPU_MEMORY_FREE: Final = _declare_gauge(
    "gpu_memory_free_bytes", GPU_LABELS, "Memory free on the device."
)
GPU_MEMORY_RESERVED: Final = _declare_gauge(
    "gpu_memory_reserved_bytes", GPU_LABELS, "Memory that the driver and firmware reserve."
)
GPU_MEMORY_USED_PEAK: Final = _declare_gauge(
    "gpu_memory_used_peak_bytes",
    GPU_LABELS,
    "Highest memory in use seen in the last 60 seconds of fast sampling.",
)
GPU_MEMORY_HELD: Final = _declare_gauge(
    "gpu_memory_held_bytes",
    (*GPU_LABELS, "holder"),
    "Memory in use by holder; the holders sum to the memory in use.",
)
GPU_PROCESSES: Final = _declare_gauge(
    "gpu_processes",
    GPU_LABELS,
    "Compute processes that the driver lists on the GPU; absent where it lists none of them.",
)
UNIFIED_FREE_BLOCKS: Final = _declare_gauge(
    "unified_memory_free_blocks_bytes",
    GPU_LABELS,
    "Memory of a machine whose GPU uses it that is free in blocks of 2 MiB and more; the rest may"
    " be page cache.",
)
GPU_MEMORY_LEFT_BEHIND: Final = _declare_gauge(
    "gpu_memory_left_behind_bytes",
    GPU_LABELS,
    "GPU memory held by left-over processes of an exited engine; absent when there are none.",
)
GPU_UTILIZATION: Final = _declare_gauge(
    "gpu_utilization_ratio",
    GPU_LABELS,
    "Share of the driver's last period in which the GPU was busy.",
)
GPU_TEMPERATURE: Final = _declare_gauge(
    "gpu_temperature_celsius", GPU_LABELS, "Temperature of the GPU die."
)
GPU_POWER: Final = _declare_gauge("gpu_power_watts", GPU_LABELS, "Power drawn by the device.")
GPU_XID_ERRORS: Final = _declare_counter(
    "gpu_xid_errors",
    (*GPU_LABELS, "xid"),
    "XID errors the driver reported for this device since the daemon started; xid 0 counts what"
    " came after 128 codes.",
)

ENGINE_INFO: Final = _declare_gauge(
    "engine_info",
    (*ENGINE_LABELS, "profile"),
    "An engine on the page and the profile its page was read with; always 1.",
)
ENGINE_AWAKE: Final = _declare_gauge(
    "engine_awake", ENGINE_LABELS, "1 while the engine is awake, 0 while it sleeps."
)
ENGINE_RUNNING: Final = _declare_gauge(
    "engine_requests_running", ENGINE_LABELS, "Requests in execution."
)
ENGINE_WAITING: Final = _declare_gauge(
    "engine_requests_waiting", ENGINE_LABELS, "Requests waiting to be scheduled."
)
ENGINE_FINISHED: Final = _declare_counter(
    "engine_requests_finished",
    ENGINE_LABELS,
    "Requests the engine finished, for any reason it counts.",
)
ENGINE_PREEMPTIONS: Final = _declare_counter(
    "engine_preemptions", ENGINE_LABELS, "Requests preempted because the KV cache was full."
)
ENGINE_PROMPT_TOKENS: Final = _declare_counter(
    "engine_prompt_tokens", ENGINE_LABELS, "Prompt tokens processed, cached ones included."
)
ENGINE_GENERATION_TOKENS: Final = _declare_counter(
    "engine_generation_tokens", ENGINE_LABELS, "Tokens generated."
)
ENGINE_KV_USED: Final = _declare_gauge(
    "engine_kv_cache_used_ratio",
    ENGINE_LABELS,
    "Share of the KV cache that running requests hold; full means queueing.",
)
ENGINE_KV_TOKENS_USED: Final = _declare_gauge(
    "engine_kv_cache_token_used_ratio",
    ENGINE_LABELS,
    "Share of the KV cache that holds tokens, by the probe: less than its blocks in use.",
)
ENGINE_KV_CAPACITY_TOKENS: Final = _declare_gauge(
    "engine_kv_cache_capacity_tokens", ENGINE_LABELS, "Tokens the KV cache of this engine can hold."
)
ENGINE_KV_CAPACITY_BYTES: Final = _declare_gauge(
    "engine_kv_cache_capacity_bytes",
    ENGINE_LABELS,
    "Size of the KV cache of this engine in bytes.",
    needs=("kv_capacity_tokens",),
)
ENGINE_PREFIX_QUERIES: Final = _declare_counter(
    "engine_prefix_cache_queries",
    ENGINE_LABELS,
    "Tokens (blocks before vLLM 0.9) looked up in the prefix cache.",
)
ENGINE_PREFIX_HITS: Final = _declare_counter(
    "engine_prefix_cache_hits",
    ENGINE_LABELS,
    "Tokens (blocks before vLLM 0.9) found in the prefix cache.",
)

ENGINE_STATE: Final = _declare_gauge(
    "engine_state",
    ("state",),
    "1 for the state of the server as a whole. down: no metrics page and no engine process;"
    " starting: it has not served yet; stalled: it should make progress and makes none.",
)
ENGINE_START: Final = _declare_gauge(
    "engine_start_timestamp_seconds",
    (),
    "When this run of the engine started, in seconds since the epoch.",
)
ENGINE_RESTARTS: Final = _declare_counter(
    "engine_restarts", (), "Engine starts seen after the first one."
)
ENGINE_EXITS: Final = _declare_counter(
    "engine_exits", ("reason",), "Engine exits, by what is known of the cause."
)
ENGINE_EXIT_REQUESTS: Final = _declare_gauge(
    "engine_exit_requests",
    (),
    "Requests that ran or waited on the engine's last page before its last exit; absent where"
    " unknown, and before any exit.",
)
LAST_INCIDENT: Final = _declare_gauge(
    "last_incident_timestamp_seconds",
    (),
    "Time of the newest incident in the state directory, in seconds since the epoch; absent"
    " without one.",
)
WEB_CONFIG_RELOAD: Final = _declare_gauge(
    "web_config_reload_success",
    (),
    "1 while the last reading of the web configuration was taken, 0 while an earlier one applies;"
    " absent without one.",
)
ENGINE_PROGRESS_AGE: Final = _declare_gauge(
    "engine_progress_age_seconds",
    (),
    "Time since a token, a prefill or a request last made progress; absent without work.",
)
ENGINE_KV_STRANDED: Final = _declare_gauge(
    "engine_kv_cache_stranded_ratio",
    ENGINE_LABELS,
    "Share of the KV cache that no request holds: a minute after the last one, with the probe"
    " also under load.",
    needs=LIVE_SHARE,
)

ENGINE_MEMORY: Final = _declare_gauge(
    "engine_memory_bytes",
    (*GPU_LABELS, "part"),
    "GPU memory of the engine by use, from the probe in it; where all parts are known they sum to"
    " what it holds.",
)
ALLOCATOR_ALLOCATED: Final = _declare_gauge(
    "allocator_allocated_bytes",
    GPU_LABELS,
    "Memory of tensors in torch's caching allocator, by the probe inside the engine.",
)
ALLOCATOR_RESERVED: Final = _declare_gauge(
    "allocator_reserved_bytes",
    GPU_LABELS,
    "Memory that torch's caching allocator reserved, in use or cached.",
)
ALLOCATOR_RETRIES: Final = _declare_counter(
    "allocator_retries",
    GPU_LABELS,
    "Allocations that found no memory and were tried again after the cache was flushed.",
)
ALLOCATOR_OOMS: Final = _declare_counter(
    "allocator_ooms", GPU_LABELS, "OutOfMemoryErrors that torch raised in the engine."
)
ENGINE_PEAK: Final = _declare_gauge(
    "engine_peak_bytes",
    (*GPU_LABELS, "work"),
    "Highest memory of torch above its level at rest in the steps of the last minute, by the kind"
    " of work; from the probe, with HEADROOM_PROBE_PEAKS=on.",
)
ENGINE_PEAK_ROOM: Final = _declare_gauge(
    "engine_peak_room_bytes",
    GPU_LABELS,
    "Memory that a step may take now: what is free on the GPU, and what torch holds unused.",
)
ENGINE_PEAK_RATIO: Final = _declare_gauge(
    "engine_peak_ratio",
    (*GPU_LABELS, "work"),
    "The peak of the last minute over the memory that a step may take now.",
)
ENGINE_PEAK_SPREAD: Final = _declare_gauge(
    "engine_peak_spread_bytes",
    (*GPU_LABELS, "work"),
    "By how much a repeated peak of this kind of work may be higher; absent while the kind was seen"
    " too seldom.",
)
ENGINE_SAFE_PROMPT_TOKENS: Final = _declare_gauge(
    "engine_safe_prompt_tokens",
    GPU_LABELS,
    "Tokens of the largest prompt that fits beside what runs now; absent while prompts were seen"
    " too seldom.",
)
ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS: Final = _declare_gauge(
    "engine_safe_prompt_logprobs_tokens",
    GPU_LABELS,
    "Tokens of the largest prompt with prompt logprobs that fits beside what runs now; absent while"
    " they were seen too seldom.",
)
ENGINE_SAFE_IMAGE_PIXELS: Final = _declare_gauge(
    "engine_safe_image_pixels",
    GPU_LABELS,
    "Pixels of the largest image that fits beside what runs now; absent while images were seen too"
    " seldom.",
)

MEMORY_REPORTED: Final = _declare_gauge(
    "memory_reported_bytes",
    (*GPU_LABELS, "basis"),
    "What the engine reports or is configured to use on this GPU, by the basis of the figure.",
)
MEMORY_DISCREPANCY: Final = _declare_gauge(
    "memory_discrepancy_bytes",
    (*GPU_LABELS, "basis"),
    "Memory the engine holds on this GPU minus what it reports.",
)
MEMORY_DISCREPANCY_RATIO: Final = _declare_gauge(
    "memory_discrepancy_ratio",
    (*GPU_LABELS, "basis"),
    "The discrepancy over what the engine reports.",
)
LOAD_STABLE: Final = _declare_gauge(
    "load_stable",
    (),
    "1 while the requests in the engine have stayed level for ten minutes.",
    needs=("running",),
)
MEMORY_DELTA: Final = _declare_gauge(
    "memory_delta_bytes",
    GPU_LABELS,
    "Change of the memory the engine holds since load became stable.",
    needs=("running",),
)
ENGINE_UNUSED: Final = _declare_gauge(
    "engine_unused_bytes",
    GPU_LABELS,
    "Memory of the GPU that neither the engine's budget nor anyone else uses.",
)
LEAK_STATE: Final = _declare_gauge(
    "leak_state",
    (*GPU_LABELS, "state"),
    "1 for the one state this GPU is in; growing is the early warning, leaking the alarm.",
)
LEAK_RATE: Final = _declare_gauge(
    "leak_bytes_per_second",
    GPU_LABELS,
    "Growth that load does not explain; absent unless growing or leaking.",
)
LEAK_RATE_LOWER: Final = _declare_gauge(
    "leak_bytes_per_second_lower", GPU_LABELS, "Lower end of the 95 % interval of the growth."
)
LEAK_RATE_UPPER: Final = _declare_gauge(
    "leak_bytes_per_second_upper", GPU_LABELS, "Upper end of the 95 % interval of the growth."
)
LEAK_PER_REQUEST: Final = _declare_gauge(
    "leak_bytes_per_request",
    GPU_LABELS,
    "The same growth per finished request.",
    needs=("finished_total",),
)
LEAKED: Final = _declare_gauge(
    "leaked_bytes", GPU_LABELS, "Growth since the leak began; absent unless growing or leaking."
)
LEAK_BOUND: Final = _declare_gauge(
    "leak_bound_bytes",
    (*GPU_LABELS, "process"),
    "What the configured pools may still take, of a GPU or of the host memory of these processes;"
    " absent where none is known.",
)
LEAK_LOCATION: Final = _declare_gauge(
    "leak_location",
    (*GPU_LABELS, "location"),
    "1 for where memory grows: tensors nobody frees, fragmentation, or outside torch; absent"
    " unless growing or leaking.",
)
TIME_TO_OOM: Final = _declare_gauge(
    "time_to_oom_seconds",
    GPU_LABELS,
    "Time until the device is full at the expected load; absent unless growing or leaking.",
)
TIME_TO_OOM_LOWER: Final = _declare_gauge(
    "time_to_oom_seconds_lower", GPU_LABELS, "Lower bound of the time to out-of-memory."
)
MEMORY_PER_RUNNING_REQUEST: Final = _declare_gauge(
    "memory_per_running_request_bytes",
    GPU_LABELS,
    "Memory the engine holds per running request.",
    needs=("running",),
)
MEMORY_PER_REQUEST_RATIO: Final = _declare_gauge(
    "memory_per_running_request_ratio",
    GPU_LABELS,
    "Memory per running request over its baseline at comparable load; above 1.1 is a per-request"
    " leak.",
    needs=("running", "finished_total"),
)
ENGINE_KV_TOKENS_PER_REQUEST: Final = _declare_gauge(
    "engine_kv_cache_tokens_per_running_request",
    ENGINE_LABELS,
    "KV cache tokens per running request.",
    needs=LIVE_TOKENS,
)
ENGINE_KV_BYTES_PER_REQUEST: Final = _declare_gauge(
    "engine_kv_cache_bytes_per_running_request",
    ENGINE_LABELS,
    "KV cache bytes per running request.",
    needs=LIVE_TOKENS,
)
ENGINE_ADDITIONAL_REQUESTS: Final = _declare_gauge(
    "engine_additional_requests",
    ENGINE_LABELS,
    "Requests of the current average size that still fit.",
    needs=LIVE_SHARE,
)
ENGINE_PREFIX_HIT_RATIO: Final = _declare_gauge(
    "engine_prefix_cache_hit_ratio",
    ENGINE_LABELS,
    "Prefix-cache hits over queries in the last 5 minutes; since the engine's start where vLLM V0"
    " offers no counters.",
    needs=("prefix_queries_total", "prefix_hits_total"),
)
ENGINE_STARTUP: Final = _declare_gauge(
    "engine_startup_bytes",
    ("part",),
    "What the engine's own log reported at its last start, per GPU (the largest rank): weights,"
    " activations, non_torch, cuda_graphs, kv_cache.",
)
ENGINE_REFUSED: Final = _declare_gauge(
    "engine_refused_bytes",
    (),
    "The allocation of GPU memory that was refused before the last exit, by the engine's own log;"
    " absent once it serves again.",
)

HOST_MEMORY: Final = _declare_gauge(
    "host_memory_bytes",
    ("process",),
    "Resident memory of the engine's processes on the host, summed by role.",
)
HOST_SWAP: Final = _declare_gauge(
    "host_swap_bytes",
    ("process",),
    "Swapped-out memory of the engine's processes, by role; the leak detector counts it with"
    " their resident memory.",
)

HOST_MEMORY_KIND: Final = _declare_gauge(
    "host_memory_kind_bytes",
    ("process", "kind"),
    "The resident memory by kind: anonymous; file, which the kernel reclaims; shared, which has"
    " what CUDA pins. What several processes map counts in each.",
)
HOST_MEMORY_PLANNED: Final = _declare_gauge(
    "host_memory_planned_bytes",
    ("part",),
    "What vLLM was configured to keep in host memory: kv_offload, weights_offload,"
    " multimodal_cache.",
)

HOST_MEMORY_USED: Final = _declare_gauge(
    "host_memory_used_bytes",
    (),
    "Memory in use that counts against the limit of the engine's container, or of the machine;"
    " without page cache.",
)
HOST_MEMORY_LIMIT: Final = _declare_gauge(
    "host_memory_limit_bytes",
    (),
    "Memory at which the kernel starts to kill: the limit of the container, or of the machine.",
)
HOST_OOM_KILLS: Final = _declare_counter(
    "host_oom_kills", (), "Processes of the engine's container that the kernel killed."
)
HOST_SHM_USED: Final = _declare_gauge(
    "host_shm_used_bytes", (), "Memory in use in the engine's /dev/shm."
)
HOST_SHM_LIMIT: Final = _declare_gauge("host_shm_limit_bytes", (), "Size of the engine's /dev/shm.")

MEMORY_PRESSURE: Final = _declare_gauge(
    "memory_pressure_ratio",
    (),
    "Share of the last 10 s in which the engine's container, or the machine, waited for memory"
    " (PSI, some).",
)

SLEEP_RESIDUE: Final = _declare_gauge(
    "sleep_residue_bytes",
    GPU_LABELS,
    "Memory the engine holds while it sleeps; the figure of the last sleep while it is awake.",
    needs=("awake",),
)

HOST_LEAK_STATE: Final = _declare_gauge(
    "host_leak_state",
    ("process", "state"),
    "1 for the one state the host memory of these processes is in.",
)
HOST_LEAK_RATE: Final = _declare_gauge(
    "host_leak_bytes_per_second",
    ("process",),
    "Growth that load does not explain; absent unless growing or leaking.",
)
HOST_TIME_TO_OOM: Final = _declare_gauge(
    "host_time_to_oom_seconds",
    (),
    "Time until the kernel kills; absent unless growing or leaking with a known limit.",
)
HOST_TIME_TO_OOM_LOWER: Final = _declare_gauge(
    "host_time_to_oom_seconds_lower", (), "Lower bound of the time until the kernel kills."
)

ROLE: Final = _declare_gauge(
    "role", ("role",), "1 for the role that the engine was declared to have; absent for serving."
)
SITUATION: Final = _declare_gauge(
    "situation",
    ("situation",),
    "1 for the worst situation that holds for the engine and its GPUs, and 0 for all others.",
)
GATE_OPEN: Final = _declare_gauge(
    "gate_open",
    ("gate",),
    "1 while this gate is open, 0 while it is closed; absent where it is not configured.",
)
EVICTION_REQUESTS: Final = _declare_counter(
    "eviction_requests",
    ("result",),
    "Evictions of the sidecar's pod that it asked the API server for; refused means by a"
    " PodDisruptionBudget.",
)

METRICS: Final[tuple[Metric, ...]] = tuple(_declared)
"""All metrics, in the order of declaration. The page has the same order."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}
"""All metrics, by full name."""
