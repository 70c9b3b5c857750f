"""Pure: text to readings."""
