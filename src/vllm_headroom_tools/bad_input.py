"""The error raised for input that a command cannot use."""


class BadInput(Exception):  # noqa: N818 - it describes the input
    """A trace, or the source of a trace, cannot be used.

    The message is one line for the operator.
    """
