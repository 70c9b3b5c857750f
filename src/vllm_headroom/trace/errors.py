"""What ends a command before it has an answer."""

from __future__ import annotations


class BadInput(Exception):  # noqa: N818 - it says what was given, which is all the operator needs to know
    """A trace, or a source of one, that cannot be used; the message is one line for the operator."""
