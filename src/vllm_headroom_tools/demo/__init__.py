"""The daemon over a simulated engine and GPU."""
