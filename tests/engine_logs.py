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

VLLM_0_26 = """\
(APIServer pid=7957) INFO 11-29 14:36:05 [entrypoints/.../utils/api_utils.py:273] non-default args: {'model_tag': 'tiny', 'host': '127.0.0.1', 'port': 8026, 'model': 'tiny', 'max_model_len': 4096, 'load_format': 'dummy', 'gpu_memory_utilization': 0.9, 'max_num_seqs': 8}
(EngineCore pid=8543) INFO 11-29 14:38:26 [v1/engine/core.py:124] Initializing a V1 LLM engine (v0.26.0) with config: model='tiny', dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=1
(EngineCore pid=8543) DEBUG 11-29 14:38:26 [v1/worker/gpu_worker.py:390] worker init memory snapshot: torch_peak=0.0GiB, free_memory=14.93GiB, total_memory=15.41GiB, cuda_memory=0.49GiB, torch_memory=0.0GiB, non_torch_memory=0.49GiB, timestamp=1795963106.5258358, auto_measure=True
(EngineCore pid=8543) DEBUG 11-29 14:38:26 [v1/worker/gpu_worker.py:391] worker requested memory: 13.87GiB
(EngineCore pid=8543) INFO 11-29 14:39:08 [v1/worker/gpu_model_runner.py:5347] Model loading took 0.0 GiB memory and 18.119010 seconds
(EngineCore pid=8543) INFO 11-29 14:42:33 [v1/worker/gpu_model_runner.py:6612] Profiling CUDA graph memory: PIECEWISE=5 (largest=16), FULL=4 (largest=8)
(EngineCore pid=8543) INFO 11-29 14:42:48 [v1/worker/gpu_model_runner.py:6737] Estimated CUDA graph memory: 0.04 GiB total
(EngineCore pid=8543) DEBUG 11-29 14:42:52 [v1/worker/gpu_worker.py:559] Memory profiling takes 214.00 seconds. Total non KV cache memory: 0.09GiB; torch peak memory increase: 0.08GiB; non-torch forward increase memory: 0.0GiB; weights memory: 0.0GiB.
(EngineCore pid=8543) INFO 11-29 14:42:52 [v1/worker/gpu_worker.py:560] Available KV cache memory: 13.74 GiB
(EngineCore pid=8543) INFO 11-29 14:42:52 [v1/core/kv_cache_utils.py:2177] GPU KV cache size: 28,825,136 tokens
(EngineCore pid=8543) WARNING 11-29 14:42:57 [utils/import_utils.py:408] Module vllm.third_party.deep_gemm was found but failed to import
(EngineCore pid=8543) WARNING 11-29 14:42:57 [utils/import_utils.py:408] Traceback (most recent call last):
(EngineCore pid=8543) WARNING 11-29 14:42:57 [utils/import_utils.py:408]   File "/x/site-packages/vllm/third_party/deep_gemm/__init__.py", line 117, in _find_cuda_home
(EngineCore pid=8543) WARNING 11-29 14:42:57 [utils/import_utils.py:408]     assert cuda_home is not None
(EngineCore pid=8543) WARNING 11-29 14:42:57 [utils/import_utils.py:408] AssertionError
(EngineCore pid=8543) INFO 11-29 14:44:43 [v1/worker/gpu_model_runner.py:6844] Graph capturing finished in 8 secs, took 0.04 GiB
(APIServer pid=7957) DEBUG 11-29 14:45:02 [v1/metrics/loggers.py:324] Engine 000: vllm cache_config_info with initialization after num_gpu_blocks is: 1801571
"""
"""A start of vLLM 0.26.0 until just before it serves, with a module that it cannot import."""

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
