"""Pure functions that derive advice from facts, one for each cause."""
