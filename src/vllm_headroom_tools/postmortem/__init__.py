"""What happened before an engine ended, and why."""
