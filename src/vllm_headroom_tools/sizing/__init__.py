"""The GPU memory that a model needs.

The package reads no files, except that `public_models` reads its own table.
"""
