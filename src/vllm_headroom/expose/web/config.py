"""Read web.config.yml with the keys and meanings of Prometheus's exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import Struct


class WebConfigError(Exception):
    """A file that cannot be used; `lines` has one line per mistake."""

    def __init__(self, lines: list[str]) -> None:
        self.lines: Final = tuple(lines)
        super().__init__("\n".join(lines))


def read_document(path: Path) -> object:
    """Return the content of a YAML file; raises WebConfigError, also for a key given twice."""
    from vllm_headroom.yaml_file import NotYamlError, read_yaml  # noqa: PLC0415 - YAML takes 15 ms, and 1 MiB

    try:
        document, twice = read_yaml(path)
    except OSError as error:
        raise WebConfigError([f"it cannot be read ({error.strerror})"]) from None
    except NotYamlError:
        raise WebConfigError(["it is not YAML"]) from None
    if twice:
        raise WebConfigError([f"{name}: given twice" for name in twice])
    return document


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
_KEYS: Final = {
    "": ("tls_server_config", "http_server_config", "basic_auth_users"),
    "tls_server_config": (
        "cert_file",
        "key_file",
        "client_auth_type",
        "client_ca_file",
        "client_allowed_sans",
        "min_version",
        "max_version",
    ),
    "http_server_config": ("http2", "headers"),
}
_REFUSED: Final = {
    "cert": "put it into a file and name that in cert_file",
    "key": "put it into a file and name that in key_file",
    "client_ca": "put it into a file and name that in client_ca_file",
    "cipher_suites": "those of OpenSSL's default are offered",
    "curve_preferences": "those of OpenSSL's default are offered",
    "prefer_server_cipher_suites": "those of OpenSSL's default are offered",
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
    """Return the file's settings, with paths relative to it; raises WebConfigError."""
    document = read_document(path)
    mistakes = _Mistakes()
    config = mistakes.config(document if document is not None else {}, path.parent)
    if mistakes.lines:
        raise WebConfigError(mistakes.lines)
    return config


class _Mistakes:
    """Reads a document and collects its mistakes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def config(self, document: object, folder: Path) -> WebConfig:
        top = self._mapping("", document)
        http = self._mapping("http_server_config", _read_key(top, "http_server_config"))
        if http.get("http2") is True:
            self.lines.append("http_server_config.http2: HTTP/2 is not spoken here: leave it out, or set it to false")
        tls = top.get("tls_server_config")
        return WebConfig(
            tls=None if tls is None else self._tls(self._mapping("tls_server_config", tls), folder),
            headers=self._headers(_read_key(http, "headers")),
            users=self._users(_read_key(top, "basic_auth_users")),
        )

    def _mapping(self, name: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.lines.append(f"{name or 'the file'}: not a mapping")
            return {}
        for key in value:
            where = f"{name}.{key}".lstrip(".")
            if key in _REFUSED:
                self.lines.append(f"{where}: not kept here: {_REFUSED[key]}")
            elif key not in _KEYS[name]:
                self.lines.append(f"{where}: not a key, accepts {', '.join(_KEYS[name])}")
        return value

    def _tls(self, tls: dict[str, Any], folder: Path) -> Tls | None:
        files = {name: self._file(tls, name, folder) for name in ("cert_file", "key_file", "client_ca_file")}
        auth = self._one_of(tls, "client_auth_type", CLIENT_AUTH, "")
        sans = [] if tls.get("client_allowed_sans") is None else tls["client_allowed_sans"]
        if not isinstance(sans, list):
            self.lines.append("tls_server_config.client_allowed_sans: not a list of names")
            sans = []
        if auth is not ssl.CERT_NONE and files["client_ca_file"] is None:
            self.lines.append("tls_server_config.client_ca_file: missing, and client_auth_type needs it")
        if auth is ssl.CERT_NONE and files["client_ca_file"] is not None:
            self.lines.append("tls_server_config.client_auth_type: missing, and without it no certificate is requested")
        lowest, highest = (
            self._one_of(tls, name, VERSIONS, default)
            for name, default in (("min_version", "TLS12"), ("max_version", "TLS13"))
        )
        if lowest > highest:
            self.lines.append("tls_server_config.max_version: below min_version, which lets nobody in")
        cert, key = files["cert_file"], files["key_file"]
        if cert is None or key is None:
            self.lines.append("tls_server_config: cert_file and key_file are both needed")
            return None
        return Tls(
            cert_file=cert,
            key_file=key,
            client_auth=auth,
            client_ca_file=files["client_ca_file"],
            client_allowed_sans=tuple(map(str, sans)),
            min_version=lowest,
            max_version=highest,
        )

    def _file(self, tls: dict[str, Any], name: str, folder: Path) -> Path | None:
        value = tls.get(name)
        if value and not (isinstance(value, str) and value.isprintable()):
            self.lines.append(f"tls_server_config.{name}: not the path of a file")
        return folder / str(value) if value else None

    def _one_of(self, tls: dict[str, Any], name: str, meanings: Mapping[str, Any], default: str) -> Any:  # noqa: ANN401 - a value of the table
        value = tls.get(name, default)
        if not isinstance(value, str) or value not in meanings:
            known = ", ".join(each for each in meanings if each)
            self.lines.append(f"tls_server_config.{name}: got {value!r}, accepts {known}")
            return meanings[default]
        return meanings[value]

    def _headers(self, headers: object) -> dict[str, str]:
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            self.lines.append("http_server_config.headers: not a mapping of names to texts")
            return {}
        for name, value in headers.items():
            if name not in HEADERS:
                self.lines.append(f"http_server_config.headers.{name}: not a header, accepts {', '.join(HEADERS)}")
            if not (value.isascii() and value.isprintable()):
                self.lines.append(f"http_server_config.headers.{name}: HTTP cannot carry its value")
        return headers

    def _users(self, users: object) -> dict[str, str]:
        if not isinstance(users, dict):
            self.lines.append("basic_auth_users: not a mapping of names to bcrypt hashes")
            return {}
        for name, secret in users.items():
            if not _BCRYPT.fullmatch(str(secret)):
                self.lines.append(f"basic_auth_users.{name}: not a bcrypt hash, make one with htpasswd -nBC 10 ''")
        return {str(name): str(secret) for name, secret in users.items()}


def _read_key(mapping: dict[str, Any], name: str) -> object:
    """Return the value of a key; null is an empty mapping, any other empty value is no mapping."""
    value = mapping.get(name)
    return {} if value is None else value
