"""TLS and logins, as set in a Prometheus web configuration file."""
