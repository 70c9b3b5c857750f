"""Advice based on an engine log."""
