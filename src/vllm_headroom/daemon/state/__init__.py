"""The state that outlasts a restart of the daemon."""
