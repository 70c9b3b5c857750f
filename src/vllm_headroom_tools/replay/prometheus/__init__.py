"""A trace reconstructed from the data in a Prometheus server."""
