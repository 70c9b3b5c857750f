"""Follows the engine through its lives: begun, serving, stalled, asleep, ended."""
