"""The recorded past as it is written: the trace, the flight record and incidents."""
