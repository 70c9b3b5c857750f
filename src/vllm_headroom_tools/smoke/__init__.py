"""The command `smoke`, which tests whether vLLM serves requests after it has started."""
