"""What the daemon sees on this machine, what is missing, and how to fix it."""
