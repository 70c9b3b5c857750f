"""What the probe sees of a vLLM: its processes, how it loads plugins, and where it keeps what it knows. No engine."""

__version__ = "0.32.0"
