"""Admit clients by a web configuration file that may change while the daemon runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import ssl
from collections.abc import Mapping
from errno import ESPIPE
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.expose.answers import Request, Response, respond_text
from vllm_headroom.expose.web.config import Tls, WebConfig, WebConfigError, read_web_config
from vllm_headroom.log import Log
from vllm_headroom.worker import Worker

CHECK_SECONDS: Final = 5.0
"""A hash of the usual cost takes 60 ms; a client that waits longer behind others' guesses is refused."""

_MOST_KEPT: Final = 100
"""Correct passwords, cached by a keyed hash as in exporter-toolkit: a scrape must not cost 60 ms."""

_NOBODY: Final = b"$2b$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"
"""The hash for unknown names, so that they take as long as known ones (exporter-toolkit's)."""


class Users:
    """Checks logins on a thread, one after another."""

    def __init__(self) -> None:
        self._worker = Worker[bool]("passwords")
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, None] = {}

    async def is_login_valid(self, users: Mapping[str, str], authorization: str) -> bool:
        """Return whether the header names a user with the right password."""
        login = _parse_login(authorization)
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


def _parse_login(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(token, validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no base64, no UTF-8, or not even ASCII
        return None


log = Log(__name__)

RELOAD_SECONDS: Final = 5.0
FILE_SECONDS: Final = 2.0


class _Loaded(Struct, frozen=True, kw_only=True):
    """The file as it was read, its TLS context, and the state of its files at that time."""

    config: WebConfig
    tls: ssl.SSLContext | None
    marks: tuple[object, ...]


class Door:
    """Applies the web configuration in `file`; while a later version is invalid, the last valid one applies.

    File access may hang, and password checks are slow on purpose: each of the two has a separate thread.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._worker = Worker[_Loaded]("web")
        self._users = Users()
        self._lock = _load(file)
        self._problem: str | None = None

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of the next connection; None for plain HTTP."""
        return self._lock.tls

    def is_admitted(self, certificate: dict[str, object] | None) -> bool:
        """Return whether the client's verified certificate has one of the allowed names."""
        tls = self._lock.config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        names = (certificate or {}).get("subjectAltName", ())
        return any(name[1] in tls.client_allowed_sans for name in names)  # type: ignore[attr-defined]

    async def find_refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without a valid login, None with one."""
        users = self._lock.config.users
        if not users or await self._users.is_login_valid(users, request.headers.get("authorization", "")):
            return None
        refused = respond_text(401, "Unauthorized")
        return Response(status=401, body=refused.body, headers=(*refused.headers, ("WWW-Authenticate", "Basic")))

    def add_headers(self, answer: Response) -> Response:
        """Return the answer with the file's headers."""
        headers = self._lock.config.headers
        if not headers:
            return answer
        others = (each for each in answer.headers if each[0] not in headers)
        return Response(
            status=answer.status,
            body=answer.body,
            content_type=answer.content_type,
            headers=(*others, *headers.items()),
        )

    async def watch(self) -> None:
        """Reload the file whenever it or a file that it names has changed, for ever."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                found = await self._worker.call(lambda: _reload(self._file, self._lock), FILE_SECONDS)
            except TimeoutError:
                self._report(f"the volume does not answer within {FILE_SECONDS:g} s")
            except OSError as error:
                self._report(error.strerror or str(error))
            except WebConfigError as error:
                self._report("; ".join(error.lines))
            else:
                if found is not self._lock:
                    self._lock = found
                    log.info("web configuration read again", file=str(self._file))
                self._report(None)

    def _report(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            log.warning("web configuration not read again, the last one holds", problem=problem, file=str(self._file))
        self._problem = problem


def _load(file: Path) -> _Loaded:
    config = read_web_config(file)
    return _Loaded(
        config=config, tls=None if config.tls is None else _build_context(config.tls), marks=_stat_files(file, config)
    )


def _reload(file: Path, lock: _Loaded) -> _Loaded:
    return lock if _stat_files(file, lock.config) == lock.marks else _load(file)


def _stat_files(file: Path, config: WebConfig) -> tuple[object, ...]:
    """Return what changes when a file is written or replaced, in place or by a link as in Kubernetes."""
    files = [file]
    if config.tls is not None:
        files += [config.tls.cert_file, config.tls.key_file]
        files += [config.tls.client_ca_file] if config.tls.client_ca_file else []
    return tuple(_stat_file(each) for each in files)


def _stat_file(file: Path) -> object:
    try:
        stat = file.stat()
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _build_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = tls.min_version, tls.max_version
    context.set_alpn_protocols(["http/1.1"])
    try:
        # without a password OpenSSL would ask the terminal
        context.load_cert_chain(_refuse_pipe(tls.cert_file), _refuse_pipe(tls.key_file), password="")
    except OSError as error:
        problem = f"tls_server_config.cert_file, key_file: no pair that can be used ({error.strerror or error})"
        raise WebConfigError([problem]) from None
    context.verify_mode = tls.client_auth
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(_refuse_pipe(tls.client_ca_file))
        except OSError as error:
            problem = f"tls_server_config.client_ca_file: it cannot be used ({error.strerror or error})"
            raise WebConfigError([problem]) from None
    return context


def _refuse_pipe(file: Path) -> Path:
    """Return the file; raises OSError for a pipe, for which OpenSSL would wait."""
    if file.is_fifo():
        raise OSError(ESPIPE, "a pipe cannot be read again")
    return file
