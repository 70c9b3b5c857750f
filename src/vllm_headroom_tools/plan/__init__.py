"""The `plan` command, which answers whether a model fits on the given GPUs."""
