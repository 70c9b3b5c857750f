"""Pure rules from facts to advice, a function for each cause."""
