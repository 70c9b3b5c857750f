"""Leak detection: growth that load, warm-up and the allocator do not explain."""
