"""Traces of GPU and host memory from mechanisms: an allocator, an engine that uses it, a card and its neighbours."""
