"""Advice on a change that fixes an engine's memory trouble."""
