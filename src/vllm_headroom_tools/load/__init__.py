"""The `load` command, which puts a bounded load on a server and watches the server's memory."""
