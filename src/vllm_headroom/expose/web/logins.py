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
"""How long a login may wait for its check; then the client gets status 429. A check of the usual
cost takes 60 ms, so only many guesses of others can delay a login for so long."""

REST_FACTOR: Final = 4
"""After a wrong password, no password is checked for this many times as long as that check took: so
guesses take at most a fifth of a core."""

MOST_WAITING_LOGINS: Final = 64
"""Our choice: with more logins waiting, the one with the most mistakes is given up."""

MOST_CACHED_OUTCOMES: Final = 1000
"""How many outcomes are cached, by a keyed hash as in exporter-toolkit: neither each scrape nor a
repeated mistake may cost 60 ms."""

MOST_COUNTED_CLIENTS: Final = 1000
"""Our choice: with mistakes counted for more clients, and names that they tried, all counts start
over from zero."""

BCRYPT_BYTES: Final = 72
"""bcrypt reads only this many bytes of a password; newer libraries refuse longer ones."""


class _Login(Struct, frozen=True, kw_only=True):
    """A login that waits for its check."""

    client: str
    """The address that sent it."""
    name: str
    check: Callable[[], bool]
    """Slow: it computes a bcrypt hash."""
    outcome: asyncio.Future[bool | None]
    """Whether the password is right; None where the check was given up."""


class Users:
    """Checks logins on a thread: first those of clients and names with the fewest mistakes."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        """The key of the hash, another one in each process."""
        self._outcomes: dict[bytes, bool] = {}
        """Whether the password was right, by the hash of name, password hash and password."""
        self._mistakes: Counter[tuple[str, ...]] = Counter()
        """By client, and by client and name."""
        self._waiting: list[_Login] = []
        self._checking: asyncio.Task[None] | None = None
        """The task of `_check_all`; None before the first login."""

    async def is_login_valid(
        self, users: Mapping[str, str], authorization: str, client: str
    ) -> bool | None:
        """Return whether the Authorization header names a user with the right password.

        None where the check was given up, because too many other logins wait or it took too long.
        `users` are bcrypt hashes by name.
        """
        credentials = _parse_credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        # An unknown name is checked too, so that the time does not show which names exist.
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
        """Queue a login and return whether its password is right.

        None where it was given up: after CHECK_SECONDS, or for logins with fewer mistakes.
        """
        self._waiting.append(login)
        if len(self._waiting) > MOST_WAITING_LOGINS:
            # Of several logins with the most mistakes, the newest.
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
        """Return how many mistakes this client made, and how many of them with this name.

        Logins of a low rank are checked first.
        """
        return self._mistakes[(login.client,)], self._mistakes[(login.client, login.name)]

    async def _check_all(self) -> None:
        """Check the waiting logins one after another, until none waits.

        After each check that did not find the right password, count a mistake and rest; a check
        that was given up counts as a mistake too. The outcome is None where the check took too long
        or no thread could be started.
        """
        loop = asyncio.get_running_loop()
        while self._waiting:
            login = min(self._waiting, key=self._rank)
            self._waiting.remove(login)
            if login.outcome.done():  # the client has left, or has waited for too long
                continue
            start_seconds = loop.time()
            is_right = None
            # TimeoutError is an OSError too.
            with contextlib.suppress(OSError):
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
    """Return name and password of a header; None where it is no valid basic authentication."""
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
    """Return the hash whose check takes longest, by the cost, which follows `$2b$` in a hash.

    There must be at least one user.
    """
    return max(users.values(), key=lambda password_hash: password_hash[4:6])


def _is_right(password: bytes, password_hash: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - most daemons have no users

    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], password_hash)
    except ValueError:  # the hash, or the password for it, is none that bcrypt can use
        return False
