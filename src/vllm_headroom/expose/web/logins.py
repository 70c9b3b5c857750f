"""Check logins one after another, so that guesses cost little and delay nobody else."""

import asyncio
import base64
import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom.worker import Worker

CHECK_SECONDS: Final = 5.0
"""A hash of the usual cost takes 60 ms; a client that waits longer behind others' guesses gets
429."""

REST_FACTOR: Final = 4
"""After a wrong password the checks rest for this many times what it took: guesses take a fifth of
a core at most."""

MOST_WAITING_LOGINS: Final = 64
"""Our choice: beyond this, the waiting login with the most mistakes is given up."""

MOST_CACHED_OUTCOMES: Final = 1000
"""Outcomes, cached by a keyed hash as in exporter-toolkit: a scrape must not cost 60 ms, nor a
repeated mistake."""

MOST_COUNTED_CLIENTS: Final = 1000
"""Our choice: clients, and names that they tried, whose mistakes are counted before all counts
start over."""

BCRYPT_BYTES: Final = 72
"""What bcrypt reads of a password; newer libraries refuse more."""


class _Login(Struct, frozen=True, kw_only=True):
    """A login that waits for its check."""

    client: str  # the address that sent it
    name: str
    check: Callable[[], bool]
    # whether the password is right; None where the check was given up
    outcome: asyncio.Future[bool | None]


class Users:
    """Checks logins on a thread: first those of clients and names with the fewest mistakes."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        self._outcomes: dict[bytes, bool] = {}
        self._mistakes: Counter[tuple[str, ...]] = Counter()
        self._waiting: list[_Login] = []
        self._checking: asyncio.Task[None] | None = None

    async def is_login_valid(
        self, users: Mapping[str, str], authorization: str, client: str
    ) -> bool | None:
        """Return whether the header names a user with the right password.

        None where too many other logins wait. `users` are bcrypt hashes by name.
        """
        credentials = _parse_credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        # an unknown name is checked too, so that the time does not show which names exist
        password_hash = users.get(name) or _find_costliest(users)
        cache_key = hashlib.blake2b(
            b"\0".join((name.encode(), password_hash.encode(), password)), key=self._key
        ).digest()
        if cache_key not in self._outcomes:
            login = _Login(
                client=client,
                name=name,
                check=lambda: _is_right(password, password_hash.encode()),
                outcome=asyncio.get_running_loop().create_future(),
            )
            is_right = await self._wait(login)
            if is_right is None:
                return None
            if len(self._outcomes) >= MOST_CACHED_OUTCOMES:
                oldest = next(iter(self._outcomes))
                del self._outcomes[oldest]
            self._outcomes[cache_key] = is_right
        return self._outcomes[cache_key] and name in users

    async def _wait(self, login: _Login) -> bool | None:
        """Return the outcome of a login's check; None where there is none in time."""
        self._waiting.append(login)
        if len(self._waiting) > MOST_WAITING_LOGINS:
            # of those with the most mistakes the one that came last
            worst = max(reversed(self._waiting), key=self._rank)
            self._waiting.remove(worst)
            worst.outcome.set_result(None)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_all())
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await login.outcome
        except TimeoutError:
            return None

    def _rank(self, login: _Login) -> tuple[int, int]:
        """Return how many mistakes this client made, and how many of them with this name."""
        return self._mistakes[(login.client,)], self._mistakes[(login.client, login.name)]

    async def _check_all(self) -> None:
        """Check the waiting logins one after another, until none waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            login = min(self._waiting, key=self._rank)
            self._waiting.remove(login)
            if login.outcome.done():  # the client has left, or has waited for too long
                continue
            start_seconds = loop.time()
            is_right = None
            with contextlib.suppress(OSError):  # TimeoutError is one; or no thread can be started
                is_right = await self._worker.call(login.check, CHECK_SECONDS)
            if not login.outcome.done():
                login.outcome.set_result(is_right)
            if not is_right:
                self._count_mistake(login)
                await asyncio.sleep(REST_FACTOR * (loop.time() - start_seconds))

    def _count_mistake(self, login: _Login) -> None:
        if len(self._mistakes) > MOST_COUNTED_CLIENTS:
            self._mistakes.clear()
        self._mistakes.update([(login.client,), (login.client, login.name)])


def _parse_credentials(authorization: str) -> tuple[str, bytes] | None:
    """Return name and password of a header; None where it is not HTTP's basic authentication."""
    scheme, _, token = authorization.partition(" ")
    try:
        raw_name, colon, password = base64.b64decode(token, validate=True).partition(b":")
        name = raw_name.decode()
    except ValueError:  # no base64, no UTF-8, or not even ASCII
        return None
    if scheme.lower() != "basic" or not colon:
        return None
    return name, password


def _find_costliest(users: Mapping[str, str]) -> str:
    """Return the hash that takes longest; the cost of bcrypt is in its characters 4 and 5."""
    return max(users.values(), key=lambda password_hash: password_hash[4:6])


def _is_right(password: bytes, password_hash: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - most daemons have no users

    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], password_hash)
    except ValueError:
        return False
