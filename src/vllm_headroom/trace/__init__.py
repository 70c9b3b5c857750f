"""The formats of recorded data: the trace, the flight record and incidents."""
