"""Pure but for one file: what a model takes of a GPU."""
