"""Whether a server that runs out of memory should get traffic, and when it is best begun anew."""
