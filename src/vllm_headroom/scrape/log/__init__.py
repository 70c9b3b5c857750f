"""Fetch additions to the engine's log from files, the API server or the journal."""
