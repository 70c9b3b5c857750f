"""The daemon, run against a simulated engine and GPU."""
