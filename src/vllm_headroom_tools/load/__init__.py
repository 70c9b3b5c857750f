"""The command `load`: a bounded load on a server that the user names, with its memory watched beside it."""
