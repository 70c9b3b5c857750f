"""The engine's processes, read from /proc."""
