"""Read the engine's log: turn its lines into records."""
