"""The CI gate.

It checks whether a vLLM version uses or leaks more memory than allowed.
"""
