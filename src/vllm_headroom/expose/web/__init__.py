"""TLS and login by Prometheus's web configuration file."""
