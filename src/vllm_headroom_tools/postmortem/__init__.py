"""What happened before an engine exited, and why."""
