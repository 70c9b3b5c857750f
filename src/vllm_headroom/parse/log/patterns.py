"""The log lines with facts about an engine, and those that report failures.

The wording and the versions are from the releases of vLLM, SGLang and TensorRT-LLM. In vLLM, the
files are vllm/worker/worker.py, vllm/v1/worker, vllm/v1/core/kv_cache_utils.py and
vllm/v1/executor.
"""

import re
from typing import Final, TypeVar

from msgspec import Struct

from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import LogEventKind, LogFailureKind, LogRemarkKind, StartPhase

COUNT: Final = 1
SHARE_PER_PERCENT: Final = 0.01

NUMBER: Final = r"(-?\d[\d,]{0,18}(?:\.\d{1,12})?)"
"""A figure, whose thousands may be separated by commas."""


class LinePattern(Struct, frozen=True, kw_only=True):
    """A line that carries figures."""

    name: str
    pattern: re.Pattern[str]
    """Matched at the beginning of the message. Text within another line cannot match."""

    since: str
    """The first engine version that writes this line."""

    until: str | None = None
    """The last engine version that writes this line, or None if still written."""

    figures: tuple[tuple[str, float], ...] = ()
    """For each group of the pattern: its field, and the factor that converts to bytes. The factor
    is 1 if the figure is not a size. If two groups fill the same field, their values are added.
    """

    text: str | None = None
    """The field filled by the last group, if that group is text."""

    kind: LogEventKind = LogEventKind.FIGURES
    phase: StartPhase | None = None
    """The engine's phase when it writes this line."""

    remark: LogRemarkKind | None = None
    is_least: bool = False
    """Whether the smallest of a process's figures is kept instead of the newest."""

    is_part: bool = False
    """Whether the figures of several lines from the same process are added up."""


def _line(
    name: str, pattern: str, since: str, *figures: tuple[str, float], **more: object
) -> LinePattern:
    text = pattern.replace("<N>", NUMBER)
    return LinePattern(name=name, pattern=re.compile(text), since=since, figures=figures, **more)  # type: ignore[arg-type]


_LOADING: Final = StartPhase.LOADING
_PROFILING: Final = StartPhase.PROFILING
_CACHE: Final = StartPhase.CACHE
_READY: Final = StartPhase.READY
_SERVING: Final = StartPhase.SERVING

_KV_CACHE_ADVICE: Final = (
    r"(?: Replace gpu_memory_utilization config with `--kv-cache-memory=<N>` \(\S{1,20} GiB\) to"
    r" fit into requested memory, or `--kv-cache-memory=<N>`)?"
)
"""The optional advice at the end of a line about a successful start."""

VLLM_LINES: Final = (
    # Loading.
    _line("loading_begins", r"Starting to load model ", "0.6", phase=_LOADING),
    _line(
        "weights_0.6",
        r"Loading model weights took <N> G",
        "0.6",
        ("weights_bytes", GIB),
        until="0.7",
        phase=_PROFILING,
    ),
    _line(
        "weights", r"Model loading took <N> Gi?B", "0.7", ("weights_bytes", GIB), phase=_PROFILING
    ),
    _line(
        "loading_peak",
        r"Peak GPU memory after loading weights: <N> GiB",
        "0.18",
        ("loading_peak_bytes", GIB),
    ),
    # The memory at the start.
    _line(
        "snapshot",
        r"worker init memory snapshot: .{0,80}?free_memory=<N>GiB, total_memory=<N>GiB,"
        r" cuda_memory=<N>GiB, .{0,80}?non_torch_memory=<N>GiB",
        "0.15",
        ("free_at_start_bytes", GIB),
        ("total_bytes", GIB),
        ("used_at_start_bytes", GIB),
        ("non_torch_at_start_bytes", GIB),
    ),
    _line("requested", r"worker requested memory: <N>GiB", "0.15", ("requested_bytes", GIB)),
    # The profile.
    _line(
        "profile_results",
        r"Memory profiling results: total_gpu_memory=<N>GiB initial_memory_usage=<N>GiB"
        r" peak_torch_memory=<N>GiB memory_usage_post_profile=[\d.]+Gi[bB]"
        r" non_torch_memory=<N>GiB kv_cache_size=<N>GiB gpu_memory_utilization=<N>",
        "0.6.3",
        ("total_bytes", GIB),
        ("used_at_start_bytes", GIB),
        ("torch_peak_bytes", GIB),
        ("non_torch_bytes", GIB),
        ("kv_cache_bytes", GIB),
        ("utilization_ratio", COUNT),
        until="0.6.4",
        phase=_CACHE,
    ),
    _line(
        "profile_budget",
        r"the current vLLM instance can use total_gpu_memory \(<N>GiB\) x gpu_memory_utilization"
        r" \(<N>\) = <N>GiB",
        "0.6.5",
        ("total_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
        until="0.11",
    ),
    _line(
        "profile_parts",
        r"model weights take <N>GiB; non_torch_memory takes <N>GiB; PyTorch activation peak memory"
        r" takes <N>GiB; the rest of the memory reserved for KV Cache is <N>GiB",
        "0.6.5",
        ("profiled_weights_bytes", GIB),
        ("non_torch_bytes", GIB),
        ("activation_bytes", GIB),
        ("kv_cache_bytes", GIB),
        until="0.11",
        phase=_CACHE,
    ),
    _line(
        "profile",
        r"Memory profiling takes [\d.]+ seconds\. Total non KV cache memory: <N>GiB; torch peak"
        r" memory increase: <N>GiB; non-torch forward increase memory: <N>GiB; weights memory:"
        r" <N>GiB",
        "0.9",
        ("total_non_kv_bytes", GIB),
        ("activation_bytes", GIB),
        ("non_torch_bytes", GIB),
        ("profiled_weights_bytes", GIB),
    ),
    _line(
        "profile_xpu",
        r"After memory profiling run, peak memory usage is <N> MB,torch mem is <N> MB, non-torch"
        r" mem is <N> MB",
        "0.9",
        ("total_non_kv_bytes", MIB),
        ("torch_peak_bytes", MIB),
        ("non_torch_bytes", MIB),
        until="0.15",
    ),
    _line(
        "profile_initial",
        r"Initial free memory: <N> GiB; Requested memory: <N> \(util\), <N> GiB",
        "0.11",
        ("free_at_start_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
    ),
    _line(
        "profile_free",
        r"Free memory after profiling: <N> GiB \(total\)",
        "0.11",
        ("free_after_profile_bytes", GIB),
    ),
    _line(
        "kv_cache_fixed",
        r"Initial free memory <N> ?GiB, reserved <N> ?GiB memory for KV Cache as specified",
        "0.10.2",
        ("free_at_start_bytes", GIB),
        ("kv_cache_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "startup_plan",
        r"Applying persisted startup plan \(fingerprint \S{1,80}\): kv_cache_memory_bytes=<N>"
        r" \([\d.]+ GiB\), recorded free-memory baseline [\d.]+ GiB, current <N> GiB",
        "0.26",
        ("kv_cache_bytes", COUNT),
        ("free_at_start_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "kv_cache_of_host",
        r"Auto set \(<N>/[\d.]+\) GiB for KV cache on node",
        "0.20",
        ("kv_cache_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "kv_cache",
        r"Available KV cache memory: <N> GiB",
        "0.9",
        ("kv_cache_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "usage",
        r"Free memory on device (?:\S+ )?\(<N>/<N> GiB\) on startup\. Desired GPU memory"
        r" utilization"
        r" is \(<N>, <N> GiB\)\. Actual usage is <N> GiB for weight, <N> GiB for peak activation,"
        r" <N> GiB for non-torch memory, and <N> GiB for CUDAGraph memory\."
        rf"{_KV_CACHE_ADVICE}",
        "0.10.2",
        ("free_at_start_bytes", GIB),
        ("total_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
        ("profiled_weights_bytes", GIB),
        ("activation_bytes", GIB),
        ("non_torch_bytes", GIB),
        ("graphs_bytes", GIB),
        ("kv_cache_within_budget_bytes", COUNT),
        ("kv_cache_whole_gpu_bytes", COUNT),
        until="0.26",
    ),
    _line(
        "usage_0.27",
        r"Free memory on device (?:\S+ )?\(<N>/<N> GiB\) on startup\. Desired GPU memory"
        r" utilization"
        r" is \(<N>, <N> GiB\)\. Actual usage is [\d.]+ GiB for consumed memory"
        r" \(weights \+ non-torch\), <N> GiB for peak activation, and <N> GiB for CUDAGraph"
        rf" memory\.{_KV_CACHE_ADVICE}",
        "0.27",
        ("free_at_start_bytes", GIB),
        ("total_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
        ("activation_bytes", GIB),
        ("graphs_bytes", GIB),
        ("kv_cache_within_budget_bytes", COUNT),
        ("kv_cache_whole_gpu_bytes", COUNT),
    ),
    # CUDA graphs.
    _line(
        "graph_sizes",
        r"Profiling CUDA graph memory: PIECEWISE=<N> \(largest=<N>\)(?:, FULL=<N>)?",
        "0.18",
        ("graph_piecewise_count", COUNT),
        ("graph_largest_tokens", COUNT),
        ("graph_full_count", COUNT),
    ),
    _line(
        "graph_sizes_full",
        r"Profiling CUDA graph memory: FULL=<N> \(largest=<N>\)",
        "0.18",
        ("graph_full_count", COUNT),
        ("graph_largest_tokens", COUNT),
    ),
    _line(
        "graphs_estimated",
        r"Estimated CUDA graph memory: <N> GiB",
        "0.18",
        ("graphs_estimated_bytes", GIB),
    ),
    _line(
        "graphs",
        r"Graph capturing finished in <N> secs(?:, took <N> GiB)?",
        "0.6",
        ("graph_capture_seconds", COUNT),
        ("graphs_bytes", GIB),
        phase=_READY,
    ),
    _line(
        "graph_pool",
        r"CUDA graph pool memory: <N> GiB \(actual\), <N> GiB \(estimated\)",
        "0.18",
        ("graphs_bytes", GIB),
        ("graphs_estimated_bytes", GIB),
    ),
    # The KV cache.
    _line(
        "blocks",
        r"# [A-Za-z]+ blocks: <N>(?:, # CPU blocks: <N>)?",
        "0.6",
        ("kv_cache_blocks", COUNT),
        ("cpu_blocks", COUNT),
        until="0.11",
        phase=_CACHE,
        is_least=True,
    ),
    _line(
        "tokens",
        r"(?:GPU|CPU|XPU|HPU|TPU)(?: \+ host)? KV cache size: <N> tokens"
        r"(?:, Maximum concurrency for <N> tokens per request: <N>x)?",
        "0.8",
        ("kv_cache_tokens", COUNT),
        ("concurrency_tokens", COUNT),
        ("concurrency_ratio", COUNT),
        is_least=True,
        phase=_CACHE,
    ),
    _line(
        "concurrency",
        r"Maximum concurrency for <N> tokens per request: <N>x",
        "0.6",
        ("concurrency_tokens", COUNT),
        ("concurrency_ratio", COUNT),
        until="0.27",
        is_least=True,
    ),
    _line(
        "engine_blocks",
        r"(?:Engine \d+: )?vllm cache_config_info with initialization after num_gpu_blocks is: <N>",
        "0.9",
        ("kv_cache_blocks", COUNT),
        is_least=True,
    ),
    _line(
        "block_tokens",
        r"Setting (?:attention|kv cache) block size to <N>\b",
        "0.10",
        ("block_tokens", COUNT),
    ),
    # The configuration of the engine.
    _line("context", r"Using max model len <N>", "0.9", ("context_tokens", COUNT)),
    _line(
        "batched_tokens",
        r"Chunked prefill is enabled with max_num_batched_tokens=<N>",
        "0.6",
        ("batched_tokens", COUNT),
    ),
    _line("max_num_seqs", r"Defaulting max_num_seqs to <N> for", "0.16", ("max_num_seqs", COUNT)),
    _line(
        "context_fitted",
        r"Auto-fit max_model_len: reduced from <N> to <N> ",
        "0.14",
        ("context_wanted_tokens", COUNT),
        ("context_tokens", COUNT),
        remark=LogRemarkKind.CONTEXT_REDUCED,
    ),
    _line(
        "device_name",
        r"Using default MoE config\..{0,400}?device_name="
        r"((?:NVIDIA|AMD|Intel|Tesla)_[\w-]{1,60}?)(?:,|\.json)",
        "0.6",
        text="device_name",
    ),
    # Lines that the engine logs while it is working.
    _line(
        "initialised",
        r"init engine \(profile, create kv cache, warmup model\) took",
        "0.7",
        phase=_READY,
    ),
    _line(
        "load",
        r"(?:Engine \d+: )?Avg prompt throughput: <N> tokens/s, Avg generation throughput: <N>"
        r" tokens/s, Running: <N> reqs(?:, Swapped: \d+ reqs)?, (?:Waiting|Pending): <N> reqs"
        r"(?:,[^%]{0,80})?, GPU KV cache usage: <N>%",
        "0.6",
        ("prompt_tokens_per_second", COUNT),
        ("generation_tokens_per_second", COUNT),
        ("running_requests", COUNT),
        ("waiting_requests", COUNT),
        ("kv_cache_used_ratio", SHARE_PER_PERCENT),
        kind=LogEventKind.LOAD,
        phase=_SERVING,
    ),
    _line(
        "serving",
        r"(?:INFO: +)?Application startup complete",
        "0.6",
        kind=LogEventKind.SERVING,
        phase=_SERVING,
    ),
    _line(
        "stopping",
        r"(?:INFO: +)?(?:Shutting down$|Received (?:signal )?SIGTERM|Gracefully stopping)",
        "0.6",
        kind=LogEventKind.STOP,
    ),
    # Warnings that are relevant to memory.
    _line(
        "preempted",
        r"Sequence group \S{1,80} is preempted by PreemptionMode\.RECOMPUTE",
        "0.6",
        until="0.11",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.PREEMPTION,
    ),
    _line(
        "swapped",
        r"Sequence group \S{1,80} is preempted by PreemptionMode\.SWAP",
        "0.6",
        until="0.11",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.SWAP,
    ),
    _line(
        "swap_space",
        r"(?:Possibly t|T)oo large swap space",
        "0.6",
        until="0.15",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.SWAP,
    ),
    _line(
        "padding",
        r"Add <N> padding layers, may waste at most <N>% KV cache memory",
        "0.10",
        ("padding_layers", COUNT),
        ("kv_cache_waste_ratio", SHARE_PER_PERCENT),
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.PADDING,
    ),
    _line(
        "eager",
        r"(?:Enforce eager set|Cudagraph is disabled under eager mode|Forcing enforce_eager"
        r"|Skipping (?:encoder and decoder )?CUDA graph capture"
        r"|CUDA graph is not supported (?:on|for) .{1,80}fallback to (?:the )?eager mode)",
        "0.6",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.EAGER,
    ),
    _line(
        "fallback",
        r"(?:Falling back to |Cannot use FlashAttention|Capping cudagraph capture sizes from max)",
        "0.6",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.FALLBACK,
    ),
    _line(
        "blocked",
        r"No available shared memory broadcast block found in <N> ?s",
        "0.10",
        ("blocked_seconds", COUNT),
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.BLOCKED,
    ),
)
"""vLLM's lines."""

SGLANG_LINES: Final = (
    _line(
        "load_begins",
        r"Load weight begin\. avail mem=<N> GB",
        "0.2",
        ("free_at_start_bytes", GIB),
        phase=_LOADING,
    ),
    _line(
        "weights",
        r"Load weight end\..{0,300}?mem usage=<N> GB",
        "0.3",
        ("weights_bytes", GIB),
        phase=_PROFILING,
    ),
    _line(
        "kv_cache",
        r"KV Cache is allocated\. (?:dtype: \S+, )?#tokens: <N>, K size: <N> GB,"
        r" V size: <N> GB",
        "0.4",
        ("kv_cache_tokens", COUNT),
        ("kv_cache_bytes", GIB),
        ("kv_cache_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "kv_cache_mla",
        r"(?:KV Cache is allocated|Post-capture KV sizing: KV cache allocated)\."
        r" (?:dtype: \S+, )?#tokens: <N>, KV size: <N> GB",
        "0.4",
        ("kv_cache_tokens", COUNT),
        ("kv_cache_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "graphs",
        r"Capture (?:[\w-]{1,20} ){0,3}(?:cuda|CUDA) graph end\."
        r" (?:Time elapsed: |elapsed=)[\d.]+ s[.,](?: avail mem=[\d.]+ GB\.)? mem usage=<N> GB",
        "0.4",
        ("graphs_bytes", GIB),
        phase=_READY,
        is_part=True,
    ),
    _line(
        "limits",
        r"max_total_num_tokens=<N>, chunked_prefill_size=<N>,"
        r" max_prefill_tokens=<N>, max_running_requests=<N>, context_len=<N>"
        r"(?:, available_gpu_mem=<N> GB)?",
        "0.4",
        ("kv_cache_tokens", COUNT),
        ("batched_tokens", COUNT),
        ("prefill_tokens", COUNT),
        ("max_num_seqs", COUNT),
        ("context_tokens", COUNT),
        ("free_after_start_bytes", GIB),
    ),
    _line(
        "load",
        r"Decode batch(?: \[\d+\])?[.,].{0,40}? ?#running-req: <N>, #(?:full )?token: <N>,"
        r" (?:full )?token usage: <N>.{0,300}?gen throughput \(token/s\): <N>,"
        r"(?: largest-len: \d+,)? #queue-req: <N>",
        "0.2",
        ("running_requests", COUNT),
        ("kv_cache_used_tokens", COUNT),
        ("kv_cache_used_ratio", COUNT),
        ("generation_tokens_per_second", COUNT),
        ("waiting_requests", COUNT),
        kind=LogEventKind.LOAD,
        phase=_SERVING,
    ),
    _line(
        "serving",
        r"The server is fired up and ready to roll",
        "0.1",
        kind=LogEventKind.SERVING,
        phase=_SERVING,
    ),
    _line(
        "retracted",
        r"(?:KV cache pool is full|Decode out of memory happened)",
        "0.2",
        kind=LogEventKind.REMARK,
        remark=LogRemarkKind.PREEMPTION,
    ),
)
"""SGLang's lines; SGLang writes GB where it means GiB."""

TENSORRT_LINES: Final = (
    _line(
        "weights", r"Loaded engine size: <N> MiB", "0.5", ("weights_bytes", MIB), phase=_PROFILING
    ),
    _line(
        "profile",
        r"Peak memory during memory usage profiling \(torch \+ non-torch\): <N> GiB,"
        r" available KV cache memory when calculating max tokens: <N> GiB"
        r"(?:, fraction is set <N>, kv size (?:per token )?is <N>"
        r"(?:\. device total memory <N> GiB)?)?",
        "0.17",
        ("total_non_kv_bytes", GIB),
        ("kv_cache_bytes", GIB),
        ("kv_cache_ratio", COUNT),
        ("kv_bytes_per_token", COUNT),
        ("total_bytes", GIB),
        phase=_CACHE,
    ),
    _line(
        "kv_cache",
        r"\[MemUsageChange\] Allocated <N> GiB for max tokens in paged KV cache"
        r" \(<N>\)",
        "0.8",
        ("kv_cache_bytes", GIB),
        ("kv_cache_tokens", COUNT),
        phase=_CACHE,
    ),
    _line(
        "weights_of_torch",
        r"Memory used after loading model weights \(inside torch\) in memory usage profiling:"
        r" <N> GiB",
        "0.18",
        ("weights_bytes", GIB),
        phase=_PROFILING,
    ),
    _line(
        "activations_of_torch",
        r"Memory dynamically allocated during inference \(inside torch\) in memory usage profiling:"
        r" <N> GiB",
        "0.18",
        ("activation_bytes", GIB),
    ),
    _line(
        "non_torch",
        r"Memory used outside torch \(e\.g\., NCCL and CUDA graphs\) in memory usage profiling:"
        r" <N> GiB",
        "0.18",
        ("non_torch_bytes", GIB),
    ),
    _line(
        "activations",
        r"\[MemUsageChange\] Allocated <N> MiB for execution context memory",
        "0.8",
        ("activation_bytes", MIB),
    ),
    _line(
        "blocks",
        r"Number of blocks in KV cache primary pool: <N>",
        "0.10",
        ("kv_cache_blocks", COUNT),
    ),
    _line("block_tokens", r"Number of tokens per block: <N>", "0.8", ("block_tokens", COUNT)),
)
"""TensorRT-LLM's lines."""

LINES: Final = (*VLLM_LINES, *SGLANG_LINES, *TENSORRT_LINES)


class FailurePattern(Struct, frozen=True, kw_only=True):
    """A line, or an exception's message, that reports a failure."""

    kind: LogFailureKind
    pattern: re.Pattern[str]
    """Matched at the beginning of the message."""

    since: str
    figures: tuple[tuple[str, float], ...] = ()
    exceptions: tuple[str, ...] = ()
    """The exceptions that may carry the message. It is () if the message may also appear alone."""


def _failure(
    kind: LogFailureKind,
    pattern: str,
    since: str = "0.6",
    *figures: tuple[str, float],
    exceptions: tuple[str, ...] = (),
) -> FailurePattern:
    """Return a failure pattern.

    `<N>` matches a number. `since` is the first version that writes the line.
    """
    text = pattern.replace("<N>", NUMBER)
    return FailurePattern(
        kind=kind,
        pattern=re.compile(text),
        since=since,
        figures=figures,
        exceptions=exceptions,
    )


_KIND: Final = LogFailureKind

INVALID_OPTION: Final = "Value error, "
"""The words that pydantic prepends to the message about a configuration that vLLM refuses."""

FAILURES: Final = (
    _failure(_KIND.GPU_OUT_OF_MEMORY, r"(?:CUDA|HIP|XPU|NPU) out of memory\b(?! occurred)"),
    _failure(
        _KIND.GPU_OUT_OF_MEMORY,
        r"(?:CUDA|HIP) out of memory occurred when warming up (?:sampler|pooler)"
        r"(?: \(task=\w{1,40}\))? with <N> dummy requests",
        "0.8",
        ("dummy_requests", COUNT),
    ),
    _failure(
        _KIND.GPU_OUT_OF_MEMORY, r"(?:CUDA|HIP)(?: runtime)? error:? (?:.{0,80}\): )?out of memory"
    ),
    _failure(
        _KIND.GPU_OUT_OF_MEMORY,
        r"(?:Failed to load model - not enough GPU memory|Unable to load model, a likely reason is"
        r" the model is too large for)",
        "0.10",
    ),
    _failure(_KIND.GPU_OUT_OF_MEMORY, r"\[TensorRT-LLM\]\[ERROR\].{0,200}out of memory", "0.5"),
    _failure(
        _KIND.NO_KV_CACHE_MEMORY,
        r"(?:No available memory for the cache blocks"
        r"|Cannot auto-fit max_model_len: not enough GPU memory)",
    ),
    _failure(
        _KIND.NO_KV_CACHE_MEMORY,
        r"frontend multimodal GPU decoding reserves [\d.]+ GiB .{0,120} available for the KV cache",
        "0.25",
    ),
    _failure(
        _KIND.NO_KV_CACHE_MEMORY,
        r"(?:Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static"
        r"|Loaded weights leave no GPU memory for the KV cache"
        r"|Not enough GPU memory for hybrid "
        r"|(?:The DSV4 )?SWA pool cap .{1,80} leaves no room for the full KV pool)",
    ),
    _failure(
        _KIND.CONTEXT_TOO_LONG,
        r"The model's max seq len \(<N>\) is larger than the maximum number of tokens that can be"
        r" stored in KV cache \(<N>\)",
        "0.6",
        ("context_tokens", COUNT),
        ("kv_cache_tokens", COUNT),
    ),
    _failure(
        _KIND.CONTEXT_TOO_LONG,
        r"To serve at least one request with the models?'s max seq len \(<N>\),? \(?<N> Gi?B"
        r" KV cache"
        r" is needed, which is larger than the available KV cache memory \(<N> Gi?B\)\.?"
        r"(?: Based on the available memory, the estimated maximum model length is <N>)?",
        "0.7",
        ("context_tokens", COUNT),
        ("needed_bytes", GIB),
        ("kv_cache_bytes", GIB),
        ("fitting_tokens", COUNT),
    ),
    _failure(
        _KIND.TOO_FEW_STATE_BLOCKS,
        r"max_num_seqs \(<N>\) exceeds available Mamba cache blocks \(<N>\)",
        "0.17",
        ("max_num_seqs", COUNT),
        ("state_blocks", COUNT),
    ),
    _failure(
        _KIND.LITTLE_FREE_MEMORY,
        r"Free memory on device (?:[a-z]+:<N> |\S+ )?\(<N>/<N> GiB\) on startup is less than"
        r" (?:desired GPU memory utilization"
        r"|the engine's budget after excluding external process's weights) \(<N>, <N> GiB\)",
        "0.9",
        ("gpu", COUNT),
        ("free_bytes", GIB),
        ("total_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
    ),
    _failure(
        _KIND.LITTLE_FREE_MEMORY,
        r"Externally held weights on device (?:[a-z]+:<N> |\S+ )?\([\d.]+/<N> GiB\) exceed the"
        r" desired GPU memory utilization \(<N>, <N> GiB\)",
        "0.32",
        ("gpu", COUNT),
        ("total_bytes", GIB),
        ("utilization_ratio", COUNT),
        ("requested_bytes", GIB),
    ),
    _failure(
        _KIND.MEMORY_CHANGED,
        r"Error in memory profiling\. Initial free memory <N>(?: GiB)?, current free memory"
        r" <N>(?: GiB)?",
        "0.6",
    ),
    _failure(
        _KIND.BLOCK_BEYOND_BATCH,
        r"(?:In Mamba cache align mode, )?block_size \(<N>\) must be <= max_num_batched_tokens"
        r" \(<N>\)",
        "0.14",
        ("block_tokens", COUNT),
        ("batched_tokens", COUNT),
    ),
    _failure(
        _KIND.BLOCK_BEYOND_BATCH,
        r"In Mamba cache align mode, block_size \(<N>\)",
        "0.14",
        ("block_tokens", COUNT),
    ),
    _failure(
        _KIND.CONTEXT_BEYOND_MODEL,
        r"User-specified max_model_len \(<N>\) is greater than the derived max_model_len"
        r" \([\w.]{1,60}=<N>",
        "0.6",
        ("context_tokens", COUNT),
        ("model_tokens", COUNT),
    ),
    _failure(
        _KIND.MODEL_UNAVAILABLE,
        r"<N> Client Error(?:: |\.)",
        "0.6",
        ("http_status", COUNT),
        exceptions=(
            "HTTPError",
            "HfHubHTTPError",
            "GatedRepoError",
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
            "HTTPStatusError",
        ),
    ),
    _failure(
        _KIND.MODEL_UNAVAILABLE,
        r"(?:We couldn't connect to '|You are trying to access a gated repo|Access to model"
        r" \S{1,200}"
        r" is restricted|Cannot access gated repo|\S{1,200} is not a local folder and is"
        r" not a valid"
        r" model identifier|An error happened while trying to locate the file on the Hub"
        r"|Cannot find"
        r" the requested files|Cannot find any model weights with|Failed to load config)",
    ),
    _failure(
        _KIND.TOO_FEW_GPUS,
        r"DP adjusted local rank <N> is out of bounds",
        "0.11",
        ("local_rank", COUNT),
    ),
    _failure(
        _KIND.TOO_FEW_GPUS,
        r"World size \(<N>\) is larger than the number of available GPUs \(<N>\)",
        "0.9",
        ("needed_gpus", COUNT),
        ("available_gpus", COUNT),
    ),
    _failure(
        _KIND.TOO_FEW_GPUS,
        r"(?:CUDA error: invalid device ordinal|The number of required (?:GPUs|\w+) exceeds"
        r" the total"
        r" number|please set tensor_parallel_size \(<N>\) to less than max local gpu count"
        r" \(<N>\))",
        "0.6",
        ("needed_gpus", COUNT),
        ("available_gpus", COUNT),
    ),
    _failure(
        _KIND.DRIVER,
        r"(?:CUDA error: no kernel image is available|Found no NVIDIA driver|The NVIDIA"
        r" driver on your"
        r" system is too old|No CUDA GPUs are available|CUDA driver (?:version is insufficient"
        r"|initialization failed)|Failed to infer device type|Unexpected error from"
        r" cudaGetDeviceCount"
        r"|CUDA error: CUDA-capable device\(s\) is/are busy|CUDA unknown error)",
    ),
    _failure(
        _KIND.SHARED_MEMORY,
        r"(?:\S{1,80}:\d+:\d+ \[\d+\] .{0,100})?(?:NCCL WARN )?(?:Error while creating"
        r" shared memory"
        r" segment|Bus error|unable to (?:open|write to|mmap) (?:\d+ bytes from )?(?:file|shared"
        r" memory|<)|.{0,120}No space left on device.{0,200}/dev/shm)",
    ),
    _failure(
        _KIND.NCCL,
        r"(?:NCCL error|(?:.{0,80} )?NCCL WARN (?:Cuda failure|NET|Error|Call to)"
        r"|ncclUnhandledCudaError"
        r"|ncclSystemError|ncclInternalError|ncclRemoteError|\[Rank \d+\] (?:Watchdog"
        r" caught collective"
        r" operation timeout|Some NCCL operations have failed))",
    ),
    _failure(_KIND.NCCL, r".{0,300}NCCL error in: ", exceptions=("DistBackendError",)),
    _failure(_KIND.CUDA, r"CUDA error:"),
    _failure(_KIND.CUDA, r"(?:HIP|CUDA driver|CUBLAS|CUDNN|cuDNN|cuBLAS) error:"),
    _failure(
        _KIND.HOST_OUT_OF_MEMORY,
        r"(?:\[Errno 12\] |.{0,120}DefaultCPUAllocator: (?:can't|not enough)|Unable to"
        r" allocate <N> [KMG]iB"
        r"|Cannot allocate memory|Not enough host memory )",
    ),
    # This is the CPU backend, whose memory is host memory.
    _failure(
        _KIND.HOST_OUT_OF_MEMORY,
        r"(?:Available memory on node \d+ \([\d.]+/[\d.]+ GiB\) on (?:startup|kv cache"
        r" allocation) is less than|The worker already uses [\d.]+ GiB \(model weights and"
        r" runtime\), more than)",
        "0.20",
    ),
    _failure(_KIND.HOST_OUT_OF_MEMORY, r"", exceptions=("MemoryError",)),
    _failure(
        _KIND.KILLED,
        r"(?:Killed$|.{0,80}Killed process <N> \(|OOMKilled|.{0,120}\bReason: +OOMKilled"
        r"|.{0,60}\bExit Code: +137|(?:command terminated|exited) with (?:exit )?code 137"
        r"|Main process exited, code=killed, status=9/KILL|.{0,80}killed by the OOM killer)",
        "0.6",
        ("pid", COUNT),
    ),
    _failure(
        _KIND.KILLED,
        r"(?:Engine core initialization failed\..{0,80}Failed core proc\(s\): \{.{0,200}:"
        r" -9[,}]|.{0,160}\bdied (?:unexpectedly )?with"
        r" exit code -9|.{0,120}terminated by signal SIGKILL|.{0,120}was terminated by signal 9"
        r"|.{0,120}signal 9 \(SIGKILL\))",
    ),
    _failure(
        _KIND.HANG,
        r"(?:RPC call to \w{1,60} timed out|Execution of the model timed out|Scheduler"
        r" watchdog timeout"
        r"|Watchdog timeout)",
    ),
    _failure(_KIND.DISK_FULL, r"(?:\[Errno 28\] )?No space left on device"),
    _failure(
        _KIND.PORT_IN_USE,
        r"\[Errno 98\] (?:.{0,200})?[Aa]ddress already in use|Address already in use",
    ),
    _failure(
        _KIND.UNSUPPORTED,
        r"(?:Bfloat16 is only supported on GPUs with compute capability|The quantization"
        r" method \S+ is"
        r" not supported|Model architectures \[.{0,200}\] (?:are not supported|failed to be"
        r" inspected)"
        r"|The checkpoint you are trying to load has model type|No valid attention backend found"
        r"|Total number of attention heads \(<N>\) must be divisible)",
    ),
    _failure(
        _KIND.BAD_OPTION,
        r"(?:GPU memory utilization must be less than 1\.0|max_num_batched_tokens \(\d+\) (?:is"
        r" smaller than max_model_len|must be greater than or equal to max_num_seqs)"
        r"|Invalid kv cache dtype|Unknown kv cache dtype)",
    ),
    _failure(
        _KIND.BAD_OPTION,
        r"(?:(?:vllm|vllm serve|api_server\.py|launch_server\.py): )?error: (?:unrecognized"
        r" arguments"
        r"|argument |ambiguous option|the following arguments)",
    ),
    _failure(_KIND.BAD_OPTION, INVALID_OPTION),
    _failure(
        _KIND.ENGINE_DIED,
        r"(?:Received sigquit from a child proc|Engine core initialization failed"
        r"|EngineCore (?:encountered a fatal error"
        r"|failed to start)"
        r"|EngineCore encountered an issue|WorkerProc (?:initialization failed|failed to start)"
        r"|Engine core proc \S+ died unexpectedly|(?:Worker|Engine) (?:proc|process) .{0,80}(?:died"
        r" unexpectedly|failed to start)|Background loop has errored already|AsyncLLM"
        r" output_handler"
        r" failed|MQLLMEngine terminated|Executor failed|cancelled$)",
    ),
)
"""Failure patterns, in the order in which they are tried."""


Pattern = TypeVar("Pattern", LinePattern, FailurePattern)

HEAD_CHARACTERS: Final = 2
"""How many characters at the beginning of a line decide which patterns are tried."""


def list_heads(pattern: str) -> set[str]:
    """Return the first two characters of every line that a pattern can match.

    The set contains "" if a line may begin with any characters. Raises ValueError for a pattern
    whose parentheses do not match.
    """
    if pattern.startswith("(?:"):
        end = _find_group_end(pattern)
        # Collect the heads of all alternatives, each followed by the text after the group.
        heads = set()
        for alternative in _split_alternatives(pattern[3:end]):
            heads |= list_heads(alternative + pattern[end + 1 :].removeprefix("?"))
        if pattern[end + 1 : end + 2] == "?":
            heads |= list_heads(pattern[end + 2 :])
        return heads
    head = ""
    position = 0
    # The loop runs until the head is as long as the keys of the table.
    while len(head) < HEAD_CHARACTERS:
        character = pattern[position : position + 1]
        following = pattern[position + 1 : position + 2]
        if character == "\\" and following and not following.isalnum():
            head += following
            position += 2
        elif character.isalnum() or character in {"#", " ", "'"}:
            head += character
            position += 1
        else:
            # Any other construct, such as a character class, may match anything.
            return {""}
    return {head}


def _find_group_end(pattern: str) -> int:
    """Return the position of the bracket that closes the pattern's first group.

    Raises ValueError if the group is not closed, which is a mistake in the table.
    """
    depth = 0
    for position, character in enumerate(pattern):
        if pattern[position - 1 : position] == "\\":
            continue
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return position
    raise ValueError(pattern)


def _split_alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a group."""
    alternatives = [""]
    depth = 0
    for position, character in enumerate(pattern):
        is_escaped = pattern[position - 1 : position] == "\\"
        if character in "()" and not is_escaped:
            depth += 1 if character == "(" else -1
        if character == "|" and depth == 0 and not is_escaped:
            alternatives.append("")
        else:
            alternatives[-1] += character
    return alternatives


def _index(patterns: tuple[Pattern, ...]) -> dict[str, tuple[Pattern, ...]]:
    """Return the patterns by the first characters of the lines that they can match."""
    lists: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        for head in list_heads(pattern.pattern.pattern):
            lists.setdefault(head, []).append(pattern)
    return {head: tuple(fitting_patterns) for head, fitting_patterns in lists.items()}


LINES_BY_HEAD: Final = _index(LINES)
FAILURES_BY_HEAD: Final = _index(FAILURES)

ANY_HEAD: Final = ""
"""The key for patterns that can begin with anything."""

FAILURE_HINT: Final = re.compile(
    r"NCCL|SIGKILL|signal 9|OOM|Killed|killed|Failed core|exit code -9|code 137|Code: +137"
    r"|DefaultCPU"
    r"|No space|CUDA driver|out of memory"
)
"""Text in every line that matches a failure pattern without a fixed beginning."""
