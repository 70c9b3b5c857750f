"""vllm-headroom: the distance left to out-of-memory of a vLLM server, as Prometheus metrics."""
