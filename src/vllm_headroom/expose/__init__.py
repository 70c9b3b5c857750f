"""Samples to page."""
