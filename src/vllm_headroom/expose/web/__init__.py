"""The daemon's own door: Prometheus's web configuration file."""
