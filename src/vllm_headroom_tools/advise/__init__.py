"""Advice on changes that fix an engine's memory problems."""
