"""Admit clients according to a web configuration file that may change at runtime."""

import asyncio
import ssl
from collections.abc import Callable
from errno import ESPIPE
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.expose.answers import Request, Response, respond_text
from vllm_headroom.expose.web.config import Tls, WebConfig, WebConfigError, read_web_config
from vllm_headroom.expose.web.logins import CHECK_SECONDS, Users
from vllm_headroom.log import Log
from vllm_headroom.worker import Worker

log = Log(__name__)

RELOAD_SECONDS: Final = 5.0
"""The interval at which the files are checked for changes (our choice)."""

READ_CONFIG_SECONDS: Final = 2.0
"""The time limit for a check of the files (our choice). A volume may hang."""


class _LoadedConfig(Struct, frozen=True, kw_only=True):
    """A valid version of the file, with its TLS context and all files' state."""

    config: WebConfig
    tls: ssl.SSLContext | None
    """The TLS context, or None for plain HTTP."""
    file_states: tuple[object, ...]
    """The states of the files, as returned by `_stat_files`."""


class Door:
    """Admits clients by the web configuration in `file`, and reloads the file when it changes.

    If a later version contains a mistake, the last valid version remains in effect. Files are read
    on one thread, because file access may hang. Passwords are checked on another, because the
    checks are slow on purpose.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._worker = Worker[_LoadedConfig]("web")
        self._users = Users()
        self.loaded = _load(file)
        """The last valid version of the file."""
        self.problem: str | None = None
        """Why the file's current version is not applied. None if the version is applied."""

    def is_admitted(self, certificate: dict[str, Any] | None) -> bool:
        """Return whether the client's verified certificate has one of the allowed names.

        Returns True if the configuration does not restrict the names. `certificate` is None if the
        client did not send one.
        """
        tls = self.loaded.config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        if certificate is None:
            return False
        names = [name for _kind, name in certificate.get("subjectAltName", ())]
        return any(name in tls.client_allowed_sans for name in names)

    async def find_refusal(self, request: Request, client: str) -> Response | None:
        """Return the response that refuses a request, or None if the request may be answered.

        Status 401 means that the login is missing or wrong. Status 429 means that the login was not
        checked, because too many logins are waiting. A request may be answered if its login is
        valid. If the configuration has no users, every request may be answered. `client` is the
        client's address.
        """
        users = self.loaded.config.users
        if not users:
            return None
        login = request.headers.get("authorization", "")
        is_valid = await self._users.is_login_valid(users, login, client)
        if is_valid is None:
            retry = ("Retry-After", f"{CHECK_SECONDS:.0f}")
            return respond_text(429, "too many logins are being checked", retry)
        if is_valid:
            return None
        return respond_text(401, "Unauthorized", ("WWW-Authenticate", "Basic"))

    def add_headers(self, answer: Response) -> Response:
        """Return the response with the file's headers, which replace headers of the same name."""
        headers = self.loaded.config.headers
        own_headers = [(name, value) for name, value in answer.headers if name not in headers]
        return replace(answer, headers=(*own_headers, *headers.items()))

    async def watch(self, drop_clients: Callable[[], None]) -> None:
        """Reload the configuration whenever its file, or a file that it names, has changed.

        `drop_clients` is called after each reload, because open connections were admitted under the
        previous version.
        """
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                reloaded, problem = await self._worker.attempt(
                    lambda: _reload(self._file, self.loaded), READ_CONFIG_SECONDS
                )
            except Exception as error:  # noqa: BLE001 - any error: the last version holds
                reloaded = None
                problem = f"it cannot be understood ({type(error).__name__})"
            if reloaded is not None and reloaded is not self.loaded:
                self.loaded = reloaded
                log.info("web configuration read again", file=str(self._file))
                drop_clients()
            # A problem is logged when it changes, not on every check.
            if problem is not None and problem != self.problem:
                log.warning(
                    "web configuration not read again, the last one holds",
                    problem=problem.replace("\n", "; "),
                    file=str(self._file),
                )
            self.problem = problem


def _load(file: Path) -> _LoadedConfig:
    """Read the file and the files that it names; raise WebConfigError if any is unusable."""
    config = read_web_config(file)
    return _LoadedConfig(
        config=config,
        tls=None if config.tls is None else _build_context(config.tls),
        file_states=_stat_files(file, config),
    )


def _reload(file: Path, current: _LoadedConfig) -> _LoadedConfig:
    """Return the new version of the file, or `current` if no file has changed.

    Raises WebConfigError if the new version contains a mistake or would provide less protection. A
    file that was emptied by mistake must not remove TLS or the login.
    """
    if _stat_files(file, current.config) == current.file_states:
        return current
    reloaded = _load(file)
    if _is_tls_weaker(reloaded.config.tls, current.config.tls):
        problem = "it removes TLS or the check of client certificates, which takes a restart"
        raise WebConfigError([problem])
    if current.config.users and not reloaded.config.users:
        raise WebConfigError(["it removes all users, which takes a restart"])
    return reloaded


def _is_tls_weaker(tls: Tls | None, current: Tls | None) -> bool:
    """Return whether `tls` removes TLS, or is less strict about client certificates."""
    if current is None:
        return False
    return tls is None or tls.client_auth < current.client_auth


def _stat_files(file: Path, config: WebConfig) -> tuple[object, ...]:
    """Return the state of each file, which changes when the file is written or replaced.

    If a file cannot be examined, its state is an error number. Links are followed, because
    Kubernetes replaces the files of a Secret by changing a link.
    """
    files = [file]
    if config.tls is not None:
        files += [config.tls.cert_file, config.tls.key_file]
        if config.tls.client_ca_file is not None:
            files.append(config.tls.client_ca_file)
    states: list[object] = []
    for path in files:
        try:
            stat = path.stat()
        except OSError as error:
            states.append(error.errno)
        else:
            states.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(states)


def _build_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context; raise WebConfigError if a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = tls.min_version
    context.maximum_version = tls.max_version
    context.verify_mode = tls.client_auth
    # The server speaks only HTTP/1.1, so no other protocol may be negotiated.
    context.set_alpn_protocols(["http/1.1"])
    problem = "cert_file, key_file: no pair that can be used"
    try:
        # Without the argument `password`, OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(
            _refuse_pipe(tls.cert_file), _refuse_pipe(tls.key_file), password=""
        )
        if tls.client_ca_file is not None:
            problem = "client_ca_file: it cannot be used"
            context.load_verify_locations(_refuse_pipe(tls.client_ca_file))
    except OSError as error:
        cause = error.strerror or error
        raise WebConfigError([f"tls_server_config.{problem} ({cause})"]) from None
    return context


def _refuse_pipe(file: Path) -> Path:
    """Return the file; raise OSError for a pipe, because OpenSSL would wait on it forever."""
    if file.is_fifo():
        raise OSError(ESPIPE, "a pipe cannot be read again")
    return file
