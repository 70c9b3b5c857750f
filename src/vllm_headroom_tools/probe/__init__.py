"""The command `probe`, with one file per action."""
