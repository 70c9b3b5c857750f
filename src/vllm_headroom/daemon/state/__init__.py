"""The state that survives a restart of the daemon."""
