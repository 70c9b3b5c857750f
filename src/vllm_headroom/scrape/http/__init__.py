"""Fetch the engine's pages over HTTP."""
