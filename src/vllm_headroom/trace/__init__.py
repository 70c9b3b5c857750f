"""A recorded past, read and fed through the daemon's leak detector."""
