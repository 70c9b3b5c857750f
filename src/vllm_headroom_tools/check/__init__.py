"""The CI gate, which checks whether a vLLM version takes or leaks more memory than allowed."""
