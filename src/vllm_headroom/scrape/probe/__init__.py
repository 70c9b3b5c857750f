"""The folder that the probe inside the engine writes to."""
