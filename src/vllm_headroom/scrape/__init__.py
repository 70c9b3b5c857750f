"""I/O in: the only package that waits on the outside."""
