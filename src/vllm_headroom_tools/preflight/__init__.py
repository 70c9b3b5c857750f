"""The command `preflight`, which checks whether vLLM would start on these GPUs now."""
