"""The events before an engine's exit, and the cause of the exit."""
