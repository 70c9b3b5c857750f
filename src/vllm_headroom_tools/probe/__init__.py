"""The command `probe`, a file per action."""
