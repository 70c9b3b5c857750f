"""Pure derivations, one question per file. Each is a function of its state and the snapshot."""
