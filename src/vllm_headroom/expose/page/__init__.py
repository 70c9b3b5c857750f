"""The page for people at `/`."""
