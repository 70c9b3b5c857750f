"""The verdict and its curves in the terminal, live."""
