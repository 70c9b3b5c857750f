"""The command `load`: put a bounded load on a named server, and watch the server's memory."""
