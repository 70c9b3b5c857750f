"""What the engine serves over HTTP."""
