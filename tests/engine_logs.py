"""Logs of vLLM, as its releases write them."""
# ruff: noqa: E501 - lines of logs are long

from pathlib import Path

VLLM_0_19 = """\
(APIServer pid=1) INFO 04-22 01:46:02 [entrypoints/utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.19.0
(APIServer pid=1) INFO 04-22 01:46:02 [entrypoints/utils.py:233] non-default args: {'model': 'org/m', 'api_key': ['sk-very-secret'], 'hf_token': 'hf_secretsecret', 'max_model_len': 8192, 'gpu_memory_utilization': 0.95, 'speculative_config': {'model': 'org/draft'}}
(EngineCore pid=243) INFO 04-22 01:46:20 [v1/engine/core.py:105] Initializing a V1 LLM engine (v0.19.0) with config: model='org/m', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=2
(Worker pid=443) DEBUG 04-22 01:46:21 [v1/worker/gpu_worker.py:284] worker init memory snapshot: torch_peak=0.01GiB, free_memory=77.66GiB, total_memory=79.19GiB, cuda_memory=1.53GiB, torch_memory=0.02GiB, non_torch_memory=1.51GiB, timestamp=1776822947.147593, auto_measure=True
(Worker_TP0 pid=443) INFO 04-22 01:46:30 [v1/worker/gpu_model_runner.py:4820] Model loading took 33.88 GiB memory and 20.060388 seconds
(Worker_TP1 pid=444) INFO 04-22 01:46:30 [v1/worker/gpu_model_runner.py:4820] Model loading took 34.01 GiB memory and 20.060388 seconds
Capturing CUDA graphs (decode, FULL):  94%|█████████▍| 48/51 [00:02<00:00, 20.15it/s](Worker_TP0 pid=443) INFO 04-22 01:46:42 [v1/worker/gpu_model_runner.py:5955] Estimated CUDA graph memory: 1.92 GiB total
(Worker_TP0 pid=443) DEBUG 04-22 01:46:42 [v1/worker/gpu_worker.py:435] Memory profiling takes 43.50 seconds. Total non KV cache memory: 37.95GiB; torch peak memory increase: 1.96GiB; non-torch forward increase memory: 2.11GiB; weights memory: 33.88GiB.
(Worker_TP0 pid=443) INFO 04-22 01:46:42 [v1/worker/gpu_worker.py:436] Available KV cache memory: 37.28 GiB
(EngineCore pid=243) INFO 04-22 01:46:42 [v1/core/kv_cache_utils.py:1319] GPU KV cache size: 244,304 tokens
(EngineCore pid=243) INFO 04-22 01:46:42 [v1/core/kv_cache_utils.py:1324] Maximum concurrency for 8,192 tokens per request: 29.82x
(Worker_TP0 pid=443) INFO 04-22 01:46:51 [v1/worker/gpu_model_runner.py:6046] Graph capturing finished in 8 secs, took 1.85 GiB
(APIServer pid=1) INFO:     Application startup complete.
"""

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.74 GiB. GPU 0 has a total capacity"
    " of 79.19 GiB of which 3.68 GiB is free. Including"
    " non-PyTorch memory, this process has 75.51 GiB memory in use. Of the allocated memory 71.50 GiB is"
    " allocated by PyTorch, with 1.10 GiB allocated in private pools (e.g., CUDA Graphs), and 1.90 GiB is"
    " reserved by PyTorch but unallocated."
)
DEATH = f"""\
(EngineCore pid=243) ERROR 04-22 02:00:00 [v1/engine/core.py:900] EngineCore encountered a fatal error.
(EngineCore pid=243) ERROR 04-22 02:00:00 [v1/engine/core.py:900] Traceback (most recent call last):
(EngineCore pid=243) ERROR 04-22 02:00:00 [v1/engine/core.py:900]   File "/x/site-packages/vllm/v1/sample/sampler.py", line 88, in forward
(EngineCore pid=243) ERROR 04-22 02:00:00 [v1/engine/core.py:900] {OOM}
(APIServer pid=1) ERROR 04-22 02:00:01 [v1/engine/async_llm.py:600] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def append(file: Path, text: str) -> None:
    """Write on into a log."""
    with file.open("a") as stream:
        stream.write(text)


def begin(version: str, arguments: str = "") -> str:
    """Return the first lines of a start on a card of 79.19 GiB, of which 78.66 GiB are free."""
    return (
        f"(APIServer pid=1) INFO 04-22 01:46:02 [entrypoints/utils.py:299]  ▄▄ ▄█ █  version {version}\n"
        f"(APIServer pid=1) INFO 04-22 01:46:02 [entrypoints/utils.py:233] non-default args: {{'model': 'org/m'{arguments}}}\n"
        "(EngineCore pid=2) DEBUG 04-22 01:46:21 [v1/worker/gpu_worker.py:284] worker init memory snapshot:"
        " torch_peak=0.01GiB, free_memory=78.66GiB, total_memory=79.19GiB, cuda_memory=0.53GiB, torch_memory=0.02GiB,"
        " non_torch_memory=0.51GiB, timestamp=1776822947.1, auto_measure=True\n"
    )
