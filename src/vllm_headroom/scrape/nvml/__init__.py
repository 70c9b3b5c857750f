"""NVIDIA's GPUs, read from NVML."""
