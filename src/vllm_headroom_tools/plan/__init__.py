"""The command `plan`, which answers whether a model will fit."""
