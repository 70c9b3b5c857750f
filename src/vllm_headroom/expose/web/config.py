"""Read web.config.yml with the keys and meanings of Prometheus's exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
"""

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.inputs import show_value


class WebConfigError(ValueError):
    """A file that cannot be used; `lines` has one line per mistake."""

    def __init__(self, lines: list[str]) -> None:
        self.lines: Final = tuple(lines)
        super().__init__("\n".join(lines))


HEADERS: Final = (
    "Content-Security-Policy",
    "X-Frame-Options",
    "X-Content-Type-Options",
    "X-XSS-Protection",
    "Strict-Transport-Security",
)
CLIENT_AUTH: Final = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT: Final = re.compile(r"\$2[aby]?\$[0-9]{2}\$[./A-Za-z0-9]{53}", re.ASCII)
_FILES: Final = ("cert_file", "key_file", "client_ca_file")
_CHOICES: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "client_auth_type": (CLIENT_AUTH, ""),
    "min_version": (VERSIONS, "TLS12"),
    "max_version": (VERSIONS, "TLS13"),
}
"""The keys with one of a few values: what each value means, and the default."""

_KEYS: Final = {
    "": ("tls_server_config", "http_server_config", "basic_auth_users"),
    "tls_server_config": (*_FILES, *_CHOICES, "client_allowed_sans"),
    "http_server_config": ("http2", "headers"),
}
_OPENSSL: Final = "those of OpenSSL's default are offered"
_REFUSED: Final = {
    **{
        name: f"put it into a file and name that in {name}_file"
        for name in ("cert", "key", "client_ca")
    },
    **dict.fromkeys(
        ("cipher_suites", "curve_preferences", "prefer_server_cipher_suites"), _OPENSSL
    ),
    "rate_limit": "the number of connections is bounded in any case",
}
"""Keys of the toolkit that are not supported: refused, since protection must not be weaker than requested."""


class Tls(Struct, frozen=True, kw_only=True):
    """The TLS settings."""

    cert_file: Path
    key_file: Path
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] = ()
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The settings of the file; without `tls` plain HTTP, without `users` no login."""

    tls: Tls | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_web_config(path: Path) -> WebConfig:
    """Return the file's settings, with paths relative to it; raises WebConfigError, also for a key given twice."""
    from vllm_headroom.yaml_file import NotYamlError, read_yaml  # noqa: PLC0415 - YAML takes 15 ms, and 1 MiB

    try:
        document, twice = read_yaml(path)
    except OSError as error:
        raise WebConfigError([f"it cannot be read ({error.strerror})"]) from None
    except NotYamlError as error:
        raise WebConfigError([f"it is not YAML{error.place} ({error.problem})"]) from None
    top: Any = {} if document is None else document
    if mistakes := [f"{name}: given twice" for name in twice] or list(_find_mistakes(top)):
        raise WebConfigError(mistakes)
    tls, http = top.get("tls_server_config"), top.get("http_server_config") or {}
    return WebConfig(
        tls=None if tls is None else _build_tls(tls, path.parent),
        headers=http.get("headers") or {},
        users={
            str(name): str(secret) for name, secret in (top.get("basic_auth_users") or {}).items()
        },
    )


def _build_tls(tls: Mapping[str, Any], folder: Path) -> Tls:
    files: dict[str, Any] = {name: folder / tls[name] for name in _FILES if tls.get(name)}
    return Tls(
        **files,
        client_auth=_choose(tls, "client_auth_type"),
        client_allowed_sans=tuple(map(str, tls.get("client_allowed_sans") or ())),
        min_version=_choose(tls, "min_version"),
        max_version=_choose(tls, "max_version"),
    )


def _choose(tls: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - a value of the table
    """Return what a key's value means; None where it is none of those that are accepted."""
    meanings, default = _CHOICES[name]
    value = tls.get(name, default)
    return meanings.get(value) if isinstance(value, str) else None


def _find_mistakes(top: object) -> Iterator[str]:
    """Yield a line for each mistake; null is a missing key, any other empty value is no mapping."""
    yield from _check_keys("", top)
    known = top if isinstance(top, dict) else {}
    for name, check in (("tls_server_config", _check_tls), ("http_server_config", _check_http)):
        part = known.get(name)
        yield from _check_keys(name, part)
        if isinstance(part, dict):
            yield from check(part)
    users = known.get("basic_auth_users")
    if not isinstance(users, dict | None):
        yield "basic_auth_users: not a mapping of names to bcrypt hashes"
        return
    for name, secret in (users or {}).items():
        if not _BCRYPT.fullmatch(str(secret)):
            yield f"basic_auth_users.{name}: not a bcrypt hash, make one with htpasswd -nBC 10 ''"


def _check_keys(name: str, mapping: object) -> Iterator[str]:
    if not isinstance(mapping, dict | None):
        yield f"{name or 'the file'}: not a mapping"
        return
    for key in mapping or ():
        where = f"{name}.{key}".lstrip(".")
        if key in _REFUSED:
            yield f"{where}: not kept here: {_REFUSED[key]}"
        elif key not in _KEYS[name]:
            yield f"{where}: not a key, accepts {', '.join(_KEYS[name])}"


def _check_tls(tls: dict[str, Any]) -> Iterator[str]:
    for name in _FILES:
        if tls.get(name) and not (isinstance(tls[name], str) and tls[name].isprintable()):
            yield f"tls_server_config.{name}: not the path of a file"
    for name, (meanings, _) in _CHOICES.items():
        if _choose(tls, name) is None:
            yield f"tls_server_config.{name}: got {show_value(tls[name])}, accepts {', '.join(filter(None, meanings))}"
    auth, authority = _choose(tls, "client_auth_type"), tls.get("client_ca_file")
    lowest, highest = _choose(tls, "min_version"), _choose(tls, "max_version")
    wrong = {
        ".client_allowed_sans: not a list of names": not isinstance(
            tls.get("client_allowed_sans"), list | None
        ),
        ".client_ca_file: missing, and client_auth_type needs it": auth and not authority,
        ".client_auth_type: missing, and without it no certificate is requested": auth
        is ssl.CERT_NONE
        and authority,
        ".max_version: below min_version, which lets nobody in": lowest
        and highest
        and lowest > highest,
        ": cert_file and key_file are both needed": not (
            tls.get("cert_file") and tls.get("key_file")
        ),
    }
    yield from (f"tls_server_config{mistake}" for mistake, holds in wrong.items() if holds)


def _check_http(http: dict[str, Any]) -> Iterator[str]:
    if http.get("http2") is True:
        yield "http_server_config.http2: HTTP/2 is not spoken here: leave it out, or set it to false"
    headers = {} if http.get("headers") is None else http["headers"]
    if not isinstance(headers, dict) or not all(
        isinstance(value, str) for value in headers.values()
    ):
        yield "http_server_config.headers: not a mapping of names to texts"
        return
    for name, value in headers.items():
        if name not in HEADERS:
            yield f"http_server_config.headers.{name}: not a header, accepts {', '.join(HEADERS)}"
        if not (value.isascii() and value.isprintable()):
            yield f"http_server_config.headers.{name}: HTTP cannot carry its value"
