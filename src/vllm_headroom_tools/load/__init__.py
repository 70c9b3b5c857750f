"""The `load` command.

It puts a bounded load on a server and watches the server's memory.
"""
