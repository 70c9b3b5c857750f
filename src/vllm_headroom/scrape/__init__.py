"""Read the inputs; no other package waits for anything outside the process."""
