"""What the probe inside the engine adds: whose word counts now, and what it amounts to."""
