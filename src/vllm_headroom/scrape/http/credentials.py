"""What a server is shown and how it is checked: the token and the authorities in their files."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final

TOKEN: Final = re.compile(r"[\x21-\x7e]+")

TOKEN_BYTES: Final = 64 * 2**10
"""Far more than a token; a file such as /dev/zero never ends."""


class Unusable(Exception):  # noqa: N818 - it says what the file is
    """A file that cannot be used; the message is for the operator."""


def bearer_token(file: Path) -> str:
    """Return the token in a file; raises Unusable."""
    try:
        with file.open("rb") as stream:
            token = stream.read(TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        problem = f"the token file {file} cannot be read ({error.strerror})"
        raise Unusable(f"{problem}: make it readable for this user") from None
    if not TOKEN.fullmatch(token):
        problem = f"the token file {file} is empty or holds more than a token"
        raise Unusable(f"{problem}: write one token to it")
    return token


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """Return how a server's certificate is checked, by the usual authorities without a file; raises Unusable."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        problem = f"the CA file {ca_file} cannot be used ({error.strerror or error})"
        raise Unusable(f"{problem}: make it a readable file of PEM certificates") from None
