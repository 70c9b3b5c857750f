"""Fetch what the engine serves over HTTP."""
