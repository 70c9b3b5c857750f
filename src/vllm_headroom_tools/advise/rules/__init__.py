"""Pure rules from facts to advice, a function a cause."""
