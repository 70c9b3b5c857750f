"""Leak detection: growth that is not explained by load, warm-up or the allocator."""
