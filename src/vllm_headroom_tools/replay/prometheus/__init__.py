"""A recorded past out of a Prometheus server."""
