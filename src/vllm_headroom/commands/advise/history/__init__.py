"""What is seen of an engine, in a trace or on a page, to facts."""
