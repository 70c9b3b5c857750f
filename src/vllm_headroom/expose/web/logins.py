"""Check logins one at a time.

Guessed passwords therefore take little CPU time and do not delay other logins.
"""

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
"""How long a login may wait for its check before the client gets status 429. A check at the usual
cost takes 60 ms. Only many guesses from other clients can delay a check for so long.
"""

REST_FACTOR: Final = 4
"""The pause after a wrong password, in multiples of the time for its check. With this pause,
guesses use at most a fifth of a core.
"""

MOST_WAITING_LOGINS: Final = 256
"""If more logins are waiting, the one with the most mistakes is given up. The limit equals the
maximum number of connections. With a lower limit, logins would be given up early, and their clients
could immediately guess again.
"""

MOST_REMEMBERED_REQUESTS: Final = 4096
"""For this many undecided logins, the time of the first request is remembered. At most
MOST_WAITING_LOGINS logins arrive within CHECK_SECONDS. Times are therefore remembered for 80 s,
which is longer than the usual scrape interval.
"""

MOST_CACHED_OUTCOMES: Final = 1000
"""The maximum number of cached outcomes. As in exporter-toolkit, the key of an outcome is a keyed
hash of the login. Without the cache, each scrape and each repeated mistake would take 60 ms.
"""

MOST_COUNTED_CLIENTS: Final = 1000
"""The maximum number of mistake counters (our choice). Each client has a counter, and so has each
name that a client tries. If there are more counters, all of them restart at zero.
"""

BCRYPT_BYTES: Final = 72
"""The number of bytes of a password that bcrypt reads. Newer libraries refuse longer passwords."""


COST_DIGITS: Final = slice(4, 6)
"""The position of the cost in a bcrypt hash, after `$2b$`."""


class _Login(Struct, frozen=True, kw_only=True):
    """A login that is waiting to be checked."""

    client: str
    """The address of the client that sent the login."""
    name: str
    first_seconds: float
    """When the same login was first requested, on the event loop's clock."""
    check: Callable[[], bool]
    """Checks the password, which is slow because it computes a bcrypt hash."""
    outcome: asyncio.Future[bool | None]
    """Whether the password is correct, or None if the check was given up."""


class Users:
    """Checks logins on a thread. Clients and names with the fewest mistakes come first."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        """The key of the hash, which differs between processes."""
        self._outcomes: dict[bytes, bool] = {}
        """False for each wrong password. The key is a keyed hash of the name, password hash and
        password.
        """
        self._right_logins: dict[str, bytes] = {}
        """The keyed hash of each user's correct password, by name. Guesses do not displace these
        entries.
        """
        self._first_requests: dict[bytes, float] = {}
        """When each login without an outcome was first requested, by the same keyed hash."""
        self._is_turn_of_oldest = False
        """Whether the next login to check is the one that was first requested earliest."""
        self._mistakes: Counter[tuple[str, ...]] = Counter()
        """The number of wrong logins per client, and per client and name."""
        self._waiting: list[_Login] = []
        self._checking: asyncio.Task[None] | None = None
        """The task of `_check_all`, or None before the first login."""

    async def is_login_valid(
        self, users: Mapping[str, str], authorization: str, client: str
    ) -> bool | None:
        """Return whether the Authorization header contains a user and the correct password.

        `users` contains bcrypt hashes by name. Returns None if the check took too long. Also
        returns None if too many other logins were waiting.
        """
        credentials = _parse_credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        # Unknown names are checked too, so that the timing does not reveal which names exist.
        costliest = _find_costliest(users)
        password_hash = users.get(name) or costliest
        cache_key = hashlib.blake2b(
            b"\0".join((name.encode(), password_hash.encode(), password[:BCRYPT_BYTES])),
            key=self._key,
        ).digest()
        # This is the fast path: Prometheus logs in on every scrape. A bcrypt check takes a tenth of
        # a second.
        if name in users and self._right_logins.get(name) == cache_key:
            return True
        if cache_key in self._outcomes:
            return False
        loop = asyncio.get_running_loop()
        login = _Login(
            client=client,
            name=name,
            first_seconds=self._note_request(cache_key, loop.time()),
            check=lambda: _check_evenly(password, password_hash, costliest),
            outcome=loop.create_future(),
        )
        is_right = await self._wait(login)
        if is_right is None:
            return None
        self._first_requests.pop(cache_key, None)
        if is_right and name in users:
            self._right_logins[name] = cache_key
            return True
        # The oldest guess is removed to make room. Correct passwords are kept elsewhere.
        if len(self._outcomes) >= MOST_CACHED_OUTCOMES:
            oldest = next(iter(self._outcomes))
            del self._outcomes[oldest]
        self._outcomes[cache_key] = False
        return False

    def _note_request(self, cache_key: bytes, now_seconds: float) -> float:
        """Return when this login was first requested.

        A client that knows the password sends the same login again. A guesser sends a new login
        each time.
        """
        if len(self._first_requests) >= MOST_REMEMBERED_REQUESTS:
            oldest = next(iter(self._first_requests))
            del self._first_requests[oldest]
        return self._first_requests.setdefault(cache_key, now_seconds)

    async def _wait(self, login: _Login) -> bool | None:
        """Queue a login and return whether its password is correct.

        Returns None if the login was given up. A login is given up after CHECK_SECONDS, or if there
        are too many logins with fewer mistakes.
        """
        self._waiting.append(login)
        if len(self._waiting) > MOST_WAITING_LOGINS:
            # If several logins have the most mistakes, the newest of them is given up.
            worst = max(reversed(self._waiting), key=self._rank)
            self._waiting.remove(worst)
            if not worst.outcome.done():
                worst.outcome.set_result(None)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_all())
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await login.outcome
        except TimeoutError:
            return None

    def _rank(self, login: _Login) -> tuple[int, int, float]:
        """Return the client's number of mistakes, in total and with this name, and `first_seconds`.

        Logins with a low rank are checked first.
        """
        return (
            self._mistakes[(login.client,)],
            self._mistakes[(login.client, login.name)],
            login.first_seconds,
        )

    def _choose_next(self) -> _Login:
        """Return the next login to check: alternately the lowest-ranking one and the oldest one.

        If only the rank mattered, guessers could lock out a valid login from their address.
        """
        is_turn_of_oldest = self._is_turn_of_oldest
        self._is_turn_of_oldest = not is_turn_of_oldest
        if is_turn_of_oldest:
            return min(self._waiting, key=lambda login: login.first_seconds)
        return min(self._waiting, key=self._rank)

    async def _check_all(self) -> None:
        """Check the waiting logins one after another until none is left.

        After a wrong password, a mistake is counted and a pause follows. A check that was given up
        also counts as a mistake. The outcome is None if the check took too long. The outcome is
        also None if no thread could be started.
        """
        loop = asyncio.get_running_loop()
        while self._waiting:
            login = self._choose_next()
            self._waiting.remove(login)
            if login.outcome.done():  # The client has left or has waited too long.
                continue
            start_seconds = loop.time()
            is_right = None
            # TimeoutError is also an OSError.
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
    """Return the name and password in a header.

    Returns None if the header is not valid basic authentication.
    """
    scheme, _, token = authorization.partition(" ")
    try:
        raw_name, colon, password = base64.b64decode(token, validate=True).partition(b":")
        name = raw_name.decode()
    except ValueError:  # The header is not base64, not UTF-8, or not even ASCII.
        return None
    if scheme.lower() != "basic" or not colon:
        return None
    return name, password


def _find_costliest(users: Mapping[str, str]) -> str:
    """Return the hash with the highest cost.

    The cost follows `$2b$` in a hash. `users` must not be empty.
    """
    return max(users.values(), key=lambda password_hash: password_hash[COST_DIGITS])


def _check_evenly(password: bytes, password_hash: str, costliest: str) -> bool:
    """Return whether a password is correct. A wrong one takes the same time for every user.

    Different times would reveal which user names exist. Each increase of the cost by one doubles
    the time of a check. After a wrong password, further checks follow: one at each cost. The costs
    range from that of `password_hash` to the second highest. Together, all checks take as long as
    one check at the highest cost.
    """
    if _is_right(password, password_hash.encode()):
        return True
    cost = int(password_hash[COST_DIGITS])
    for padding_cost in range(cost, int(costliest[COST_DIGITS])):
        _is_right(password, f"$2b${padding_cost:02}{password_hash[COST_DIGITS.stop :]}".encode())
    return False


def _is_right(password: bytes, password_hash: bytes) -> bool:
    """Return whether the password matches the hash.

    Returns False if the hash is not a bcrypt hash.
    """
    import bcrypt  # noqa: PLC0415 - most daemons have no users

    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], password_hash)
    except ValueError:  # bcrypt cannot use the hash or the password.
        return False
