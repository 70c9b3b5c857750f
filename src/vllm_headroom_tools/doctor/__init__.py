"""What the daemon can see on this machine, what is missing, and how to fix it."""
