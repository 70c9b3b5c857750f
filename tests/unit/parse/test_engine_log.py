"""The engine's log: figures, causes, wrappings, and input that was made to harm."""

import json
import random
from collections.abc import Callable, Iterator

import pytest

from tests.engine_logs import DEATH, VLLM_0_19, VLLM_0_26
from vllm_headroom.model.start import EngineLog, EngineStart
from vllm_headroom.parse.log.arguments import read_arguments
from vllm_headroom.parse.log.lines import LONGEST_LINE_BYTES
from vllm_headroom.parse.log.reader import LogReader, read_log
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import LogEventKind, LogFailureKind, LogRemarkKind, StartPhase


def read_text(text: str) -> EngineLog:
    """Read a text as a log."""
    return read_log([text.encode()])


def read_start(text: str) -> EngineStart:
    """Read a text with one start."""
    log = read_text(text)
    assert log.start_count == 1
    return log.starts[0]


def wrap_docker(line: str) -> str:
    """Return a line as docker's JSON, cut in two."""
    parts = [line[: len(line) // 2], line[len(line) // 2 :] + "\n"]
    time = "2026-04-22T01:46:42.123456789Z"
    return "\n".join(json.dumps({"log": part, "stream": "stderr", "time": time}) for part in parts)


def wrap_cri(line: str) -> str:
    """Return a line as the kubelet's, cut in two."""
    time = "2026-04-22T01:46:42.123456789Z"
    middle = len(line) // 2
    return f"{time} stderr P {line[:middle]}\n{time} stderr F {line[middle:]}"


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "plain": lambda line: line,
    "docker": wrap_docker,
    "cri": wrap_cri,
    "kubectl --timestamps": lambda line: f"2026-04-22T01:46:42.123456789Z {line}",
    "kubectl --prefix": lambda line: f"[pod/vllm-0/vllm] {line}",
    "compose": lambda line: f"vllm-1  | {line}",
    "journald": lambda line: f"Apr 22 01:46:42 node-7 vllm[4242]: {line}",
    "journald iso": lambda line: f"2026-04-22T01:46:42+0000 node-7 vllm[4242]: {line}",
    "json": lambda line: json.dumps({"levelname": "INFO", "message": line}),
    "colours": lambda line: f"\x1b[36m{line}\x1b[0m",
    "progress": lambda line: f"Loading:  10%|#| 1/10\rLoading: 100%|#| 10/10\r{line}",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_figures_are_read_in_every_wrapping(wrapping: str) -> None:
    lines = (VLLM_0_19 + DEATH).splitlines()
    start = read_start("\n".join(WRAPPINGS[wrapping](line) for line in lines))

    assert start.version == "0.19.0"
    assert start.find_largest("weights_bytes") == round(34.01 * GIB)
    assert start.find_largest("activation_bytes") == round(1.96 * GIB)
    assert start.find_largest("graphs_estimated_bytes") == round(1.92 * GIB)
    assert start.find_largest("graphs_bytes") == round(1.85 * GIB)
    assert start.find_smallest("kv_cache_tokens") == 244304
    assert start.find_smallest("concurrency_ratio") == 29.82
    assert start.root_failure is not None
    assert start.root_failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY


def test_a_process_keeps_its_figures_when_its_name_changes() -> None:
    start = read_start(VLLM_0_19)
    first_worker = next(process for process in start.processes if process.pid == 443)

    assert first_worker.name == "Worker_TP0"
    assert first_worker.free_at_start_bytes == round(77.66 * GIB)
    assert first_worker.lines["kv_cache_bytes"] == 9
    assert start.phase is StartPhase.SERVING
    assert start.root_failure is None


def test_the_refused_allocation_is_read_with_its_line_and_frame() -> None:
    death = DEATH.replace("Including non-", "Process 77 has 2.00 GiB memory in use. Including non-")
    failure = read_start(VLLM_0_19 + death).root_failure

    assert failure is not None
    assert failure.line_number == 17
    assert failure.phase is StartPhase.SERVING
    assert failure.frames[-1].file == "vllm/v1/sample/sampler.py"
    assert failure.refusal is not None
    assert failure.refusal.asked_bytes == round(3.74 * GIB)
    assert failure.refusal.free_bytes == round(3.68 * GIB)
    assert failure.refusal.cached_bytes == round(1.90 * GIB)
    assert failure.refusal.graph_bytes == round(1.10 * GIB)
    assert failure.refusal.other_bytes == 2 * GIB


def test_in_a_container_the_process_itself_is_listed_under_a_pid_of_the_host() -> None:
    own = DEATH.replace("Including non-PyTorch memory, this process", "Process 2481523")
    refusal = read_start(VLLM_0_19 + own).failures[-1].refusal
    neighbour_error = own.replace("Process 2481523 has", "Process 77 has 2.00 GiB memory in use. Process 2481523 has")
    with_neighbour = read_start(VLLM_0_19 + neighbour_error).failures[-1].refusal

    assert refusal is not None
    assert with_neighbour is not None
    assert (refusal.process_bytes, refusal.other_bytes) == (round(75.51 * GIB), None)
    assert (with_neighbour.process_bytes, with_neighbour.other_bytes) == (round(75.51 * GIB), 2 * GIB)


def test_an_exception_that_is_logged_as_a_warning_is_no_failure() -> None:
    start = read_start(VLLM_0_26)
    as_error = read_start(VLLM_0_26.replace("WARNING 11-29", "ERROR 11-29"))
    document = {"levelname": "WARNING", "message": "x", "exc_info": "Traceback (most recent call last):\nKeyError: 7"}
    as_json = read_start(VLLM_0_26 + json.dumps(document) + "\n")

    assert start.failures == as_json.failures == ()
    assert start.find_largest("kv_cache_tokens") == 28_825_136
    assert [failure.exception for failure in as_error.failures] == ["AssertionError"]


def test_an_engine_that_comes_to_serve_has_survived_what_failed_before() -> None:
    failed = VLLM_0_26.replace("WARNING 11-29", "ERROR 11-29")
    start = read_start(failed + "(APIServer pid=7957) INFO:     Application startup complete.\n")

    assert start.failures == ()
    assert start.has_served


def test_a_shutdown_after_a_failure_is_its_consequence() -> None:
    stop = "INFO:     Shutting down\n"
    start = read_start(VLLM_0_19 + DEATH + stop)

    assert not start.is_stopped
    assert start.recent_events[-1].kind is LogEventKind.FAILURE
    assert read_start(VLLM_0_19 + stop).is_stopped


OLD = {
    "0.6.4": (
        (
            "INFO 04-28 04:07:51 model_runner.py:1077] Loading model weights took 2.0512 GB\n"
            "INFO 04-28 04:07:51 worker.py:232] Memory profiling results: total_gpu_memory=139.80GiB"
            " initial_memory_usage=2.71GiB peak_torch_memory=2.38GiB memory_usage_post_profile=2.81GiB"
            " non_torch_memory=0.73GiB kv_cache_size=122.71GiB gpu_memory_utilization=0.90\n"
            "INFO 04-28 04:07:52 gpu_executor.py:113] # GPU blocks: 365549, # CPU blocks: 11915\n"
        ),
        122.71,
        365549,
    ),
    "0.8": (
        (
            "INFO 07-02 17:08:01 [model_runner.py:1146] Model loading took 8.6253 GB and 7.670299 seconds\n"
            "INFO 07-02 17:08:07 [worker.py:267] Memory profiling takes 5.35 seconds\n"
            "INFO 07-02 17:08:07 [worker.py:267] the current vLLM instance can use total_gpu_memory"
            " (79.15GiB) x gpu_memory_utilization (0.70) = 55.09GiB\n"
            "INFO 07-02 17:08:07 [worker.py:267] model weights take 8.63GiB; non_torch_memory takes 0.09GiB;"
            " PyTorch activation peak memory takes 1.16GiB; the rest of the memory reserved for KV Cache is"
            " 45.21GiB.\n"
            "INFO 07-02 17:08:07 [executor_base.py:111] # cuda blocks: 14815, # CPU blocks: 1966\n"
        ),
        45.21,
        14815,
    ),
}


@pytest.mark.parametrize("version", OLD)
def test_the_lines_of_early_versions_are_read(version: str) -> None:
    text, kv_cache_gib, blocks = OLD[version]
    start = read_start(text)

    assert start.find_largest("kv_cache_bytes") == round(kv_cache_gib * GIB)
    assert start.find_smallest("kv_cache_blocks") == blocks


USAGE_0_31 = (
    "Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual"
    " usage is 15.61 GiB for consumed memory (weights + non-torch), 1.22 GiB for peak activation, and 0.62 GiB for"
    " CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57654321152` (53.69 GiB) to fit"
    " into requested memory, or `--kv-cache-memory=65587765248` (61.08 GiB) to fully utilize gpu memory. Current kv"
    " cache memory in use is 54.44 GiB."
)


def test_what_a_start_has_used_is_read_in_the_wording_of_0_27_and_later() -> None:
    start = read_start(f"(EngineCore pid=243) INFO 04-22 01:46:42 [gpu_worker.py:952] {USAGE_0_31}\n")

    expected = {"activation_bytes": 1.22, "graphs_bytes": 0.62, "requested_bytes": 71.27, "free_at_start_bytes": 78.66}
    assert {name: start.find_largest(name) for name in expected} == {
        name: round(gib * GIB) for name, gib in expected.items()
    }
    assert start.find_largest("kv_cache_within_budget_bytes") == 57_654_321_152
    assert start.find_largest("kv_cache_whole_gpu_bytes") == 65_587_765_248


LATER: dict[str, dict[str, float]] = {
    # 0.28 and later have both figures in one line.
    "GPU KV cache size: 472,208 tokens, Maximum concurrency for 8,192 tokens per request: 57.64x": {
        "kv_cache_tokens": 472_208,
        "concurrency_tokens": 8_192,
        "concurrency_ratio": 57.64,
    },
    "GPU + host KV cache size: 9,000 tokens, Maximum concurrency for 4,096 tokens per request: 2.20x": {
        "kv_cache_tokens": 9_000,
        "concurrency_ratio": 2.2,
    },
    "# GPU blocks: 27000": {"kv_cache_blocks": 27_000},
    "# CPU blocks: 512": {"kv_cache_blocks": 512},
    "Setting kv cache block size to 128 for CUTLASS_MLA backend.": {"block_tokens": 128},
    "Auto set (3.5/15.6) GiB for KV cache on node 0, with 9.0 GiB": {"kv_cache_bytes": 3.5 * GIB},
    "Applying persisted startup plan (fingerprint 1a2b): kv_cache_memory_bytes=1073741824 (1.00 GiB), recorded"
    " free-memory baseline 10.00 GiB, current 12.00 GiB. Memory": {
        "kv_cache_bytes": GIB,
        "free_at_start_bytes": 12 * GIB,
    },
    "After memory profiling run, peak memory usage is 2048.00 MB,torch mem is 1024.00 MB, non-torch mem is 512.00 MB"
    ", free": {"total_non_kv_bytes": 2 * GIB, "torch_peak_bytes": GIB, "non_torch_bytes": GIB / 2},
}


@pytest.mark.parametrize("message", LATER)
def test_a_line_of_other_releases_is_read(message: str) -> None:
    start = read_start(f"(EngineCore pid=243) INFO 04-22 01:46:42 [a.py:1] {message}\n")

    assert {name: start.find_largest(name) for name in LATER[message]} == LATER[message]


def test_a_refused_option_of_a_request_is_no_failure_of_the_engine() -> None:
    start = read_start(VLLM_0_19 + "  Value error, top_p must be in (0, 1] [type=value_error\n")

    assert start.failures == ()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Falling back to Moe WNA16 kernels.", LogRemarkKind.FALLBACK),
        ("CUDA graph is not supported on CPU, fallback to the eager mode.", LogRemarkKind.EAGER),
        ("Skipping CUDA graph capture. To turn on CUDA graph capture, ensure", LogRemarkKind.EAGER),
    ],
)
def test_a_warning_that_matters_is_a_remark(message: str, kind: LogRemarkKind) -> None:
    start = read_start(f"(EngineCore pid=243) WARNING 04-22 01:46:42 [a.py:1] {message}\n")

    assert [remark.kind for remark in start.remarks] == [kind]


FAILURES = {
    "ValueError: No available memory for the cache blocks. Try increasing": "no_kv_cache_memory",
    "ValueError: To serve at least one request with the models's max seq len (131072), (9.00 GiB KV cache is"
    " needed, which is larger than the available KV cache memory (8.11 GiB). Based on the available memory,"
    " the estimated maximum model length is 118000.": "context_too_long",
    "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be"
    " stored in KV cache (9000). Try increasing": "context_too_long",
    "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856).": "too_few_state_blocks",
    "ValueError: Free memory on device (6.9/8.0 GiB) on startup is less than desired GPU memory utilization"
    " (0.9, 7.2 GiB).": "little_free_memory",
    "ValueError: Free memory on device cuda:1 (60.87/79.19 GiB) on startup is less than desired GPU memory"
    " utilization (0.95, 75.23 GiB).": "little_free_memory",
    "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 256 dummy requests."
    " Please try lowering": "gpu_out_of_memory",
    "ValueError: frontend multimodal GPU decoding reserves 9.0 GiB (5.0 GiB raw-frame budget, 4.0 GiB decoder cache"
    " budget), but only 3.0 GiB is available for the KV cache.": "no_kv_cache_memory",
    "ValueError: Available memory on node 0 (3.1/15.6 GiB) on startup is less than desired CPU memory utilization"
    " (0.9, 14.0 GiB).": "host_out_of_memory",
    "ValueError: The worker already uses 9.1 GiB (model weights and runtime), more than the 8.0 GiB of CPU memory"
    " reserved": "host_out_of_memory",
    "AssertionError: block_size (2096) must be <= max_num_batched_tokens (2048)": "block_beyond_batch",
    "AssertionError: DP adjusted local rank 1 is out of bounds. ": "too_few_gpus",
    "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://h/x": "model_unavailable",
    "torch.distributed.DistBackendError: NCCL error in: /x.cpp:1, unhandled cuda error": "nccl",
    "node:1:2 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a": "shared_memory",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "cuda",
    "RuntimeError: CUDA error: out of memory": "gpu_out_of_memory",
    "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}": "killed",
    "Killed": "killed",
    "MemoryError": "host_out_of_memory",
}


FAILURES |= {
    "ValueError: To serve at least one request with the models's max seq len (8192), (1.00 GB KV cache is needed,"
    " which is larger than the available KV cache memory (0.50 GB). Try increasing": "context_too_long",
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single"
    " token. Try": "no_kv_cache_memory",
    "ValueError: Free memory on device cuda:0 (60.1/79.19 GiB) on startup is less than the engine's budget after"
    " excluding external process's weights (0.9, 61.2 GiB). Decrease": "little_free_memory",
    "ValueError: Externally held weights on device cuda:0 (75.0/79.19 GiB) exceed the desired GPU memory utilization"
    " (0.9, 71.27 GiB). Increase": "little_free_memory",
    "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization": "gpu_out_of_memory",
    "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (4096). This": "bad_option",
    "ValueError: GPU memory utilization must be less than 1.0. Got 1.2.": "bad_option",
    "  Value error, cudagraph_capture_sizes and another are mutually exclusive [type=value_error, input": "bad_option",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_recognised(line: str) -> None:
    failure = read_start(f"(EngineCore pid=2) INFO 04-22 01:46:02 [a.py:1] x\n{line}\n").root_failure

    assert failure is not None
    assert failure.kind == FAILURES[line]


def test_no_secret_and_no_prompt_reaches_the_record() -> None:
    prompt = "Available KV cache memory: 999 GiB"
    text = (
        f"{VLLM_0_19}(APIServer pid=1) INFO 04-22 01:50:00 [logger.py:1] Received request cmpl-1: prompt:"
        f" '(EngineCore pid=243) INFO 04-22 01:46:42 [gpu_worker.py:436] {prompt}', params: x\n"
        f"user said: (EngineCore pid=243) '{prompt}'\n"
        "(APIServer pid=1) ERROR 04-22 01:50:00 [x.py:1] Traceback (most recent call last):\n"
        "(APIServer pid=1) ERROR 04-22 01:50:00 [x.py:1] ValueError: my password is hunter2\n"
    )
    start = read_start(text)

    assert start.find_largest("kv_cache_bytes") == round(37.28 * GIB)
    assert start.arguments["max_model_len"] == 8192
    assert start.arguments["model"] == "org/m"
    for secret in ("sk-very", "hf_secret", "hunter2", "user said"):
        assert secret not in repr(start)


MARKER = "S3CR3Txyz01"
OPTIONS = (
    f"'runner': 'AIza{MARKER}'",
    f"'dtype': 'api-key-{MARKER}'",
    f"'kv_cache_dtype': 'user:{MARKER}'",
    f"'task': 'glpat-{MARKER}'",
    f"'attention_backend': 'sk_live_{MARKER}'",
    f"'distributed_executor_backend': 'xoxb-{MARKER}'",
    f"'model': 'https://user:{MARKER}@host/m'",
    f"'lora_modules': [LoRAModulePath(name='a', path='s3://key:{MARKER}@bucket')]",
    f"'additional_config': {{'AWS_SECRET_ACCESS_KEY': '{MARKER}'}}",
    f"'hf_token': '{MARKER}', 'hf_overrides': {{'key': '{MARKER}'}}",
)
HIDING_LINES = (
    *(f"(APIServer pid=1) INFO 04-22 01:46:02 [a.py:1] non-default args: {{{option}}}" for option in OPTIONS),
    f"args: Namespace(model_tag='org/m', api_key='{MARKER}', hf_token=\"{MARKER}\")",
    json.dumps({"message": "CUDA error: x", "processName": f"sk-{MARKER}"}),
    f"(EngineCore_{MARKER} pid=9) ERROR 04-22 01:46:02 [a.py:1] CUDA error: an illegal memory access",
    f"Using default MoE config. Config file not found at device_name={MARKER}.json",
    f"(APIServer pid=1) INFO 04-22 01:46:02 [a.py:1] ▄▄ ▄█ █  version {MARKER}",
    f"(EngineCore pid=2) INFO 04-22 01:46:02 [a.py:1] Initializing a V1 LLM engine (v{MARKER}) with config: x=1",
    f"requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://h/x?token={MARKER}",
    f"OSError: [Errno 98] error while attempting to bind on address ('{MARKER}', 8000): address already in use",
    f"Received request a: prompt: '(EngineCore pid=2) ERROR 04-22 02:00:00 [a.py:1] CUDA error: {MARKER}'",
)


@pytest.mark.parametrize("line", HIDING_LINES)
def test_no_place_of_a_line_lets_a_secret_into_the_record(line: str) -> None:
    log = read_text(f"{line}\n{VLLM_0_19}{line}\n{DEATH}{line}\n")

    assert MARKER not in repr(log)


def test_a_name_that_only_contains_what_secrets_begin_with_is_kept() -> None:
    names = {"model": "org/task-assistant-7b", "quantization": "compressed-tensors", "dtype": "torch.bfloat16"}

    assert read_arguments(repr(names)) == names


def test_names_of_processes_and_functions_are_names() -> None:
    text = (
        f"{VLLM_0_19}Traceback (most recent call last):\n"
        '  File "/x/vllm/a.py", line 1, in my-password-hunter2\n'
        "ValueError: x\n"
        + json.dumps({"processName": "hunter2 \x1b[2J", "message": "MemoryError"})
        + "\n"
        + json.dumps({"processName": "EngineCore_1", "message": "Killed"})
    )
    start = read_start(text)

    assert "hunter2" not in repr(start)
    assert start.failures[-1].process == "EngineCore_1"


def test_arguments_of_a_namespace_are_read() -> None:
    arguments = read_arguments("Namespace(host=None, api_key='k', model='a/b', max_num_seqs=64, x='a, b=1')")

    assert arguments == {"host": None, "model": "a/b", "max_num_seqs": 64}


def test_a_failure_that_the_engine_survives_is_no_cause() -> None:
    load = (
        "(APIServer pid=1) INFO 04-22 02:01:00 [loggers.py:1] Engine 000: Avg prompt throughput: 9.0 tokens/s,"
        " Avg generation throughput: 100.0 tokens/s, Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage:"
        " 30.0%, Prefix cache hit rate: 0.0%\n"
    )

    assert read_start(VLLM_0_19 + DEATH + load).root_failure is not None
    assert read_start(VLLM_0_19 + DEATH + load * 2).root_failure is None


def test_preemptions_are_counted() -> None:
    line = "WARNING 04-22 02:01:00 scheduler.py:1] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode\n"
    (remark,) = read_start(VLLM_0_19 + line * 3).remarks

    assert (remark.kind, remark.count, remark.line_number) == (LogRemarkKind.PREEMPTION, 3, 14)


def test_sglang_is_read() -> None:
    start = read_start(
        "[2025-10-09 09:20:00] server_args=ServerArgs(model_path='a/b', api_key='secret', tp_size=2)\n"
        "[2025-10-09 09:20:11 TP0] Load weight end. type=Llama, dtype=torch.bfloat16, avail mem=63.12 GB,"
        " mem usage=15.06 GB.\n"
        "[2025-10-09 09:20:12 TP0] KV Cache is allocated. #tokens: 371661, K size: 12.74 GB, V size: 12.74 GB\n"
        "[2025-10-09 09:20:30] The server is fired up and ready to roll!\n"
    )

    assert (start.engine, start.model, start.phase) == ("sglang", "a/b", StartPhase.SERVING)
    assert start.find_largest("kv_cache_bytes") == round(25.48 * GIB)
    assert "secret" not in repr(start)


@pytest.mark.parametrize(
    ("lines", "gib"),
    [
        (("Capture cuda graph end. Time elapsed: 7.23 s. avail mem=0.53 GB. mem usage=0.93 GB.",), 0.93),
        (
            (
                "Capture target decode CUDA graph end. elapsed=16.40 s, mem usage=1.16 GB, avail mem=8.16 GB.",
                "Capture prefill CUDA graph end. elapsed=6.00 s, mem usage=0.50 GB, avail mem=7.66 GB.",
            ),
            1.66,
        ),
    ],
)
def test_the_captures_of_sglang_add_up(lines: tuple[str, ...], gib: float) -> None:
    start = read_start("".join(f"[2026-05-15 08:40:32 TP0] {line}\n" for line in lines))

    assert start.engine == "sglang"
    assert start.find_largest("graphs_bytes") == round(gib * GIB)


def test_a_traceback_of_sglang_has_its_frames_and_what_follows_is_no_cause() -> None:
    start = read_start(
        "[2026-05-15 09:20:00 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/managers/scheduler.py", line 2026, in run_scheduler_process\n'
        "    scheduler.event_loop_overlap()\n"
        "IndexError: list index out of range\n"
        "\n"
        "[2026-05-15 09:20:00] Received sigquit from a child process. It usually means the child failed.\n"
    )
    failure = start.root_failure

    assert failure is not None
    assert (failure.kind, failure.exception) == (LogFailureKind.EXCEPTION, "IndexError")
    assert [frame.line for frame in failure.frames] == [2026]
    assert start.failures[-1].kind is LogFailureKind.ENGINE_DIED


def test_a_load_of_sglang_is_read_with_its_iteration() -> None:
    reader = LogReader()
    (event,) = reader.feed(
        b"[2026-05-15 09:20:00 TP0] Decode batch [40], #running-req: 14, #token: 785280, token usage: 0.27, accept"
        b" len: 2.47, cuda graph: True, gen throughput (token/s): 167.86, #queue-req: 2,"
    )

    assert (event.kind, event.figures["running_requests"], event.figures["waiting_requests"]) == ("load", 14, 2)


def test_what_tensorrt_llm_profiles_is_read() -> None:
    profile = (
        "Peak memory during memory usage profiling (torch + non-torch): 91.46 GiB, available KV cache memory when"
        " calculating max tokens: 41.11 GiB, fraction is set 0.85, kv size per token is 35136. device total memory"
        " 139.81 GiB, temporary kv cache memory during profiling 0.54 GiB"
    )
    lines = (
        "Memory used after loading model weights (inside torch) in memory usage profiling: 80.25 GiB",
        "Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: 2.50 GiB",
        profile,
    )
    start = read_start("".join(f"[01/16/2026-06:20:17] [TRT-LLM] [RANK 0] [I] {line}\n" for line in lines))

    expected = {
        "weights_bytes": 80.25,
        "non_torch_bytes": 2.5,
        "total_non_kv_bytes": 91.46,
        "kv_cache_bytes": 41.11,
        "total_bytes": 139.81,
    }
    assert start.engine == "tensorrt_llm"
    assert {name: start.find_largest(name) for name in expected} == {
        name: round(gib * GIB) for name, gib in expected.items()
    }


def test_each_start_of_a_file_has_a_record_and_their_number_is_bounded() -> None:
    log = read_log([(VLLM_0_19 + DEATH).encode()] * 200)

    assert log.start_count == 200
    assert len(log.starts) <= 65
    assert log.starts[0].is_followed
    assert not log.starts[-1].is_followed


def test_an_incremental_reader_reports_each_line() -> None:
    reader = LogReader()
    kinds = [event.kind for line in VLLM_0_19.splitlines() for event in reader.feed(line.encode())]

    assert kinds[:3] == ["start", "arguments", "arguments"]
    assert kinds[-1] == "serving"
    assert reader.start is not None


def test_a_line_without_end_takes_bounded_memory() -> None:
    def stream() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 2**20
        yield b"\n" + VLLM_0_19.encode()

    start = read_start_of(stream())
    assert start.find_smallest("kv_cache_tokens") == 244304


def read_start_of(chunks: Iterator[bytes]) -> EngineStart:
    """Read chunks with one start."""
    log = read_log(chunks)
    assert log.start_count == 1
    return log.starts[0]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_input_is_read_without_an_exception(seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - no secret
    lines = (VLLM_0_19 + DEATH).splitlines()
    damaged = []
    for line in lines * 5:
        data = bytearray(WRAPPINGS[source.choice(list(WRAPPINGS))](line).encode())
        for _ in range(source.randrange(8)):
            data[source.randrange(len(data))] = source.randrange(256)
        damaged.append(bytes(data[: source.randrange(len(data) + 1)]))
    damaged += [b"{" * 5000, b"[" * 5000, b"\x1b[" * 5000, source.randbytes(LONGEST_LINE_BYTES)]
    log = read_log([b"\n".join(damaged)])

    assert "sk-very" not in repr(log)
