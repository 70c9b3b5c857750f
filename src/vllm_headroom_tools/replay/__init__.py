"""The daemon's leak detector on a recorded trace."""
