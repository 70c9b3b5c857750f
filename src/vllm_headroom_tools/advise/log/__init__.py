"""The advice on a log of the engine."""
