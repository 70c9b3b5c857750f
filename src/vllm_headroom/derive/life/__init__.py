"""The engine's runs: when it is starting, serving, stalled or asleep, and when it exited."""
