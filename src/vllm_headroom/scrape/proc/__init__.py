"""What /proc says of the engine and its processes."""
