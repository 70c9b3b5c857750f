"""Pure: facts to advice, one cause a function."""
