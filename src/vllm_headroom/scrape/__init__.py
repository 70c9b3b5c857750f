"""Read the daemon's inputs; no other package waits for anything outside the process."""
