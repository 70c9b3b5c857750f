"""The command `probe`, with one file for each action."""
