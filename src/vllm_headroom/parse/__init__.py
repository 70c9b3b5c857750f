"""Pure functions that turn text into readings."""
