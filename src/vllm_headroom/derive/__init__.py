"""Pure: one question a file, each a function of its own state and the snapshot."""
