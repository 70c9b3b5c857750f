"""The GPU memory that a model needs.

The package reads no files, except for the table in `public_models`.
"""
