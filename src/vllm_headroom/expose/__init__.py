"""Turn samples into metrics, the page and the snapshot."""
