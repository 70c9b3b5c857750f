"""Pure derivations: one question per file, each a function of its state and the snapshot."""
