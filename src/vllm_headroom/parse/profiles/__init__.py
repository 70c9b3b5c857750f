"""One engine a file, as data."""
