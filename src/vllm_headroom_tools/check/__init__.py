"""The CI gate.

The command checks whether a vLLM version uses or leaks more memory than allowed.
"""
