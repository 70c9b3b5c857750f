"""The long-running process, which reads, derives and publishes once per tick."""
