"""Read the daemon's inputs. No other package waits for anything outside the process."""
