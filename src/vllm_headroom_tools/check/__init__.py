"""The CI gate, which checks whether a vLLM version uses or leaks more memory than allowed."""
