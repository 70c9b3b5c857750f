"""The daemon's leak detector, run on a recorded trace."""
