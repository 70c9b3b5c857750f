"""The engine's log: lines to records."""
