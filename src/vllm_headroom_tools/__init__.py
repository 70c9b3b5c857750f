"""The commands, which are built on the daemon's packages."""
