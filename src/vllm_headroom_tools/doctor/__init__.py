"""What the daemon can see from here, what is missing, and the line that fixes it."""
