"""What can be seen from here, what is missing and the line that fixes it."""
