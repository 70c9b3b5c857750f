"""Leak detection: finds growth that is not explained by load, warm-up or the allocator."""
