"""A trace from the history in a Prometheus server."""
