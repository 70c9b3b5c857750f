"""Basic authentication: names and bcrypt hashes."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from typing import Final

from vllm_headroom.worker import Worker

CHECK_SECONDS: Final = 5.0
"""A hash of the usual cost takes 60 ms; who has to wait longer than this behind others' guesses may ask again."""

_MOST_KEPT: Final = 100
"""Passwords that were right, remembered by a keyed hash, as exporter-toolkit does: a scrape must not cost 60 ms."""

_NOBODY: Final = b"$2b$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"
"""What an unknown name is checked against, so that it takes as long as a known one (it is exporter-toolkit's)."""


class Users:
    """Tells who may come in; checks off the loop, one after another."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, None] = {}

    async def knows(self, users: Mapping[str, str], authorization: str) -> bool:
        """Tell whether the header names a user with the right password."""
        login = _login(authorization)
        if login is None:
            return False
        name, password = login
        wanted = users.get(name, "").encode()
        seen = hashlib.blake2b(b"\0".join((name.encode(), wanted, password)), key=self._key).digest()
        if wanted and seen in self._right:
            return True
        try:
            is_right = await self._worker.call(lambda: _is_right(password, wanted or _NOBODY), CHECK_SECONDS)
        except OSError:  # TimeoutError is one; or no thread can be started
            return False
        if is_right and wanted:
            if len(self._right) >= _MOST_KEPT:
                self._right.pop(next(iter(self._right)))
            self._right[seen] = None
        return bool(is_right and wanted)


def _is_right(password: bytes, wanted: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - most daemons have no users

    try:
        return bcrypt.checkpw(password[:72], wanted)  # bcrypt reads 72 bytes, and newer libraries refuse more
    except ValueError:
        return False


def _login(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(token, validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no base64, no UTF-8, or not even ASCII
        return None
