"""The command `load`: a bounded load on a server that the user names, whose memory is watched."""
