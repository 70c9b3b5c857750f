"""The commands: rooms built on the daemon."""
