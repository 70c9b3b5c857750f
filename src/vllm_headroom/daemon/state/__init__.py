"""Keeps what the leak detector learned over a restart of the daemon."""
