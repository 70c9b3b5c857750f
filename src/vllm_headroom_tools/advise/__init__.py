"""From what was seen of an engine to the change that mends it."""
