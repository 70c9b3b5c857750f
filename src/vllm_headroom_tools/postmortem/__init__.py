"""The events that led to an engine's exit, and the cause of the exit."""
