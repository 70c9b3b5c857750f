"""What NVML says of the GPUs."""
