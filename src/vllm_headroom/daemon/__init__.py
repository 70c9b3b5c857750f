"""The long-running process: read, derive and publish, once per tick."""
