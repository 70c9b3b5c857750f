"""One rule for each cause: the finding where it fits the facts."""
