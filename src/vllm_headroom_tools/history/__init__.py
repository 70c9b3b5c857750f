"""What a recorded past is: its samples, curves and counters."""
