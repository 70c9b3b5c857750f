"""Admit clients by a web configuration file that may change while the daemon runs."""

import asyncio
import base64
import contextlib
import hashlib
import secrets
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from errno import ESPIPE
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.expose.answers import Request, Response, respond_text
from vllm_headroom.expose.web.config import Tls, WebConfig, WebConfigError, read_web_config
from vllm_headroom.log import Log
from vllm_headroom.worker import Worker

CHECK_SECONDS: Final = 5.0
"""A hash of the usual cost takes 60 ms; a client that waits longer behind others' guesses gets 429."""

REST: Final = 4
"""After a wrong password the checks rest for this many times what it took: guesses take a fifth of a core at most."""

MOST_WAITING: Final = 64
MOST_KEPT: Final = 1000
"""Outcomes, cached by a keyed hash as in exporter-toolkit: a scrape must not cost 60 ms, nor a repeated mistake."""


class _Check(Struct, frozen=True, kw_only=True):
    """A login that waits: who sent it, whether it is right, and what it is known by afterwards."""

    client: str
    name: str
    run: Callable[[], bool]
    outcome: asyncio.Future[bool | None]


class Users:
    """Checks logins on a thread, one after another: first those of clients and names with the fewest mistakes."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, bool] = {}
        self._mistakes: Counter[tuple[str, ...]] = Counter()
        self._waiting: list[_Check] = []
        self._checking: asyncio.Task[None] | None = None

    async def is_login_valid(
        self, users: Mapping[str, str], authorization: str, client: str
    ) -> bool | None:
        """Return whether the header names a user with the right password; None where too many others wait."""
        scheme, _, token = authorization.partition(" ")
        try:
            known, colon, password = base64.b64decode(token, validate=True).partition(b":")
            name = known.decode()
        except ValueError:  # no base64, no UTF-8, or not even ASCII
            return False
        if scheme.lower() != "basic" or not colon:
            return False
        # for an unknown name the costliest of the file's hashes, so that the time does not show which names exist
        wanted = (users.get(name) or max(users.values(), key=lambda each: each[4:6])).encode()
        seen = hashlib.blake2b(
            b"\0".join((name.encode(), wanted, password)), key=self._key
        ).digest()
        if seen not in self._known:
            outcome = asyncio.get_running_loop().create_future()
            check = _Check(
                client=client, name=name, run=lambda: _is_right(password, wanted), outcome=outcome
            )
            is_right = await self._wait(check)
            if is_right is None:
                return None
            if len(self._known) >= MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[seen] = is_right
        return self._known[seen] and name in users

    async def _wait(self, check: _Check) -> bool | None:
        self._waiting.append(check)
        if len(self._waiting) > MOST_WAITING:
            last = max(reversed(self._waiting), key=self._rank)
            self._waiting.remove(last)
            last.outcome.set_result(None)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_all())
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await check.outcome
        except TimeoutError:
            return None

    def _rank(self, check: _Check) -> tuple[int, int]:
        return self._mistakes[(check.client,)], self._mistakes[(check.client, check.name)]

    async def _check_all(self) -> None:
        now = asyncio.get_running_loop().time
        while self._waiting:
            check = min(self._waiting, key=self._rank)
            self._waiting.remove(check)
            if check.outcome.done():  # the client has left, or has waited for too long
                continue
            began, is_right = now(), None
            with contextlib.suppress(OSError):  # TimeoutError is one; or no thread can be started
                is_right = await self._worker.call(check.run, CHECK_SECONDS)
            if not check.outcome.done():
                check.outcome.set_result(is_right)
            if not is_right:
                if len(self._mistakes) > MOST_KEPT:
                    self._mistakes.clear()
                self._mistakes.update([(check.client,), (check.client, check.name)])
                await asyncio.sleep(REST * (now() - began))


def _is_right(password: bytes, wanted: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - most daemons have no users

    try:
        return bcrypt.checkpw(
            password[:72], wanted
        )  # bcrypt reads 72 bytes, and newer libraries refuse more
    except ValueError:
        return False


log = Log(__name__)

RELOAD_SECONDS: Final = 5.0
FILE_SECONDS: Final = 2.0


class _Loaded(Struct, frozen=True, kw_only=True):
    """The file as it was read, its TLS context, None for plain HTTP, and the state of its files at that time."""

    config: WebConfig
    tls: ssl.SSLContext | None
    marks: tuple[object, ...]


class Door:
    """Applies the web configuration in `file`; while a later version has a `problem`, the last valid one applies.

    File access may hang, and password checks are slow on purpose: each of the two has a separate thread.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._worker = Worker[_Loaded]("web")
        self._users = Users()
        self.loaded = _load(file)
        self.problem: str | None = None

    def is_admitted(self, certificate: dict[str, object] | None) -> bool:
        """Return whether the client's verified certificate has one of the allowed names."""
        tls = self.loaded.config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        names = (certificate or {}).get("subjectAltName", ())
        return any(name[1] in tls.client_allowed_sans for name in names)  # type: ignore[attr-defined]

    async def find_refusal(self, request: Request, client: str) -> Response | None:
        """Return the answer to a request without a valid login, None with one; `client` is its address."""
        users = self.loaded.config.users
        login = request.headers.get("authorization", "")
        is_valid = not users or await self._users.is_login_valid(users, login, client)
        if is_valid:
            return None
        if is_valid is None:
            return respond_text(
                429, "too many logins are being checked", ("Retry-After", f"{CHECK_SECONDS:.0f}")
            )
        return respond_text(401, "Unauthorized", ("WWW-Authenticate", "Basic"))

    def add_headers(self, answer: Response) -> Response:
        """Return the answer with the file's headers."""
        headers = self.loaded.config.headers
        others = (each for each in answer.headers if each[0] not in headers)
        return replace(answer, headers=(*others, *headers.items()))

    async def watch(self, drop_clients: Callable[[], None]) -> None:
        """Reload the file whenever it or a file that it names has changed, for ever.

        `drop_clients` is called then: an open connection was admitted by the last version's certificates.
        """
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            found, problem = await self._worker.attempt(
                lambda: _reload(self._file, self.loaded), FILE_SECONDS
            )
            if found is not None and found is not self.loaded:
                self.loaded = found
                log.info("web configuration read again", file=str(self._file))
                drop_clients()
            if problem is not None and problem != self.problem:
                text = "web configuration not read again, the last one holds"
                log.warning(text, problem=problem.replace("\n", "; "), file=str(self._file))
            self.problem = problem


def _load(file: Path) -> _Loaded:
    config = read_web_config(file)
    return _Loaded(
        config=config,
        tls=None if config.tls is None else _build_context(config.tls),
        marks=_stat_files(file, config),
    )


def _reload(file: Path, lock: _Loaded) -> _Loaded:
    """Return the file's settings, `lock` where nothing changed; raises WebConfigError, also for a door opened wider.

    A file emptied by mistake must not remove TLS or the login of a running daemon.
    """
    if _stat_files(file, lock.config) == lock.marks:
        return lock
    found, tls = _load(file), lock.config.tls
    if tls is not None and (
        found.config.tls is None or found.config.tls.client_auth < tls.client_auth
    ):
        raise WebConfigError(
            ["it removes TLS or the check of client certificates, which takes a restart"]
        )
    if lock.config.users and not found.config.users:
        raise WebConfigError(["it removes all users, which takes a restart"])
    return found


def _stat_files(file: Path, config: WebConfig) -> tuple[object, ...]:
    """Return what changes when a file is written or replaced, in place or by a link as in Kubernetes."""
    tls, marks = config.tls, list[object]()
    named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()
    for each in (file, *filter(None, named)):
        try:
            stat = each.stat()
        except OSError as error:
            marks.append(error.errno)
        else:
            marks.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(marks)


def _build_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = tls.min_version, tls.max_version
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode, keys = tls.client_auth, "cert_file, key_file: no pair that can be used"
    try:
        # without a password OpenSSL would ask the terminal
        context.load_cert_chain(
            _refuse_pipe(tls.cert_file), _refuse_pipe(tls.key_file), password=""
        )
        if tls.client_ca_file is not None:
            keys = "client_ca_file: it cannot be used"
            context.load_verify_locations(_refuse_pipe(tls.client_ca_file))
    except OSError as error:
        raise WebConfigError([f"tls_server_config.{keys} ({error.strerror or error})"]) from None
    return context


def _refuse_pipe(file: Path) -> Path:
    """Return the file; raises OSError for a pipe, for which OpenSSL would wait."""
    if file.is_fifo():
        raise OSError(ESPIPE, "a pipe cannot be read again")
    return file
