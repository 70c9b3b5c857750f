"""The command `smoke`: does vLLM serve, now that it has started?"""
