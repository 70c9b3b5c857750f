"""Input: the only package that waits for anything outside the process."""
