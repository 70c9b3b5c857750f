"""How much GPU memory a model needs. Only `public_models` reads a file, its own table."""
