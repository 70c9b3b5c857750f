"""The runs of the engine: starting, serving, stalled, asleep, exited."""
