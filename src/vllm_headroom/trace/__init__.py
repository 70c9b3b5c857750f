"""The formats of the recorded past: the trace, the flight record and incidents."""
