"""The `load` command.

The command puts a bounded load on a server and watches the server's memory.
"""
