"""Pure functions from text to readings."""
