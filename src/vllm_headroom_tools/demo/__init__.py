"""The same daemon over a simulated engine and GPU."""
