"""Read web.config.yml, with the same keys and semantics as in Prometheus's exporter-toolkit.

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
    """The file cannot be used; `lines` contains one line per mistake."""

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
"""The headers accepted by the toolkit."""

CLIENT_AUTH: Final = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""The values of client_auth_type, and the OpenSSL mode of each."""

TLS_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT: Final = re.compile(r"\$2[aby]?\$(?:0[4-9]|1[0-6])\$[./A-Za-z0-9]{53}", re.ASCII)
"""A bcrypt hash with a cost from 4 (the minimum) to 16. Each increment of the cost doubles the time
of a check. A check takes 4 s at cost 16, and a day at cost 31. No other login is checked during
that time.
"""

_FILE_KEYS: Final = ("cert_file", "key_file", "client_ca_file")


class _Choice(Struct, frozen=True, kw_only=True):
    """The accepted values of a key with their meanings, and the default."""

    meanings: Mapping[str, Any]
    default: str


_CHOICES: Final = {
    "client_auth_type": _Choice(meanings=CLIENT_AUTH, default=""),
    "min_version": _Choice(meanings=TLS_VERSIONS, default="TLS12"),
    "max_version": _Choice(meanings=TLS_VERSIONS, default="TLS13"),
}
"""The keys that accept only a few values."""

_WHOLE_FILE: Final = ""
"""The section name that refers to the file itself."""

_KEYS: Final = {
    _WHOLE_FILE: ("tls_server_config", "http_server_config", "basic_auth_users"),
    "tls_server_config": (*_FILE_KEYS, *_CHOICES, "client_allowed_sans"),
    "http_server_config": ("http2", "headers"),
}
"""The keys that each section accepts."""

_REFUSED_KEYS: Final = {
    "cert": "put it into a file and name that in cert_file",
    "key": "put it into a file and name that in key_file",
    "client_ca": "put it into a file and name that in client_ca_file",
    "cipher_suites": "those of OpenSSL's default are offered",
    "curve_preferences": "those of OpenSSL's default are offered",
    "prefer_server_cipher_suites": "those of OpenSSL's default are offered",
    "rate_limit": "the number of connections is bounded in any case",
}
"""Keys of the toolkit that are not supported here, and why. These keys are refused rather than
ignored, because protection must not be weaker than what the file requests.
"""


class Tls(Struct, frozen=True, kw_only=True):
    """The TLS settings, named after their keys."""

    cert_file: Path
    key_file: Path
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    """Whether clients may or must present a certificate."""
    client_ca_file: Path | None = None
    """The authorities that sign client certificates, or None if no certificate is requested."""
    client_allowed_sans: tuple[str, ...] = ()
    """The names that are accepted in a client's certificate. Empty if any name is accepted."""
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The settings of the file."""

    tls: Tls | None = None
    """The TLS settings, or None for plain HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers added to every response."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The bcrypt hashes by user; empty if no login is required."""


def read_web_config(path: Path) -> WebConfig:
    """Return the file's settings.

    Relative paths in the file are resolved against its folder. Raises WebConfigError if the file
    cannot be read, is not YAML, or contains mistakes. If keys are repeated, the error lists only
    the repeated keys. If no key is repeated, the error lists all mistakes.
    """
    # YAML is imported here because it takes 15 ms and 1 MiB.
    from vllm_headroom.yaml_file import NotYamlError, read_yaml  # noqa: PLC0415

    try:
        document, repeated_keys = read_yaml(path)
    except OSError as error:
        raise WebConfigError([f"it cannot be read ({error.strerror})"]) from None
    except NotYamlError as error:
        raise WebConfigError([f"it is not YAML{error.place} ({error.problem})"]) from None
    top: Any = {} if document is None else document
    mistakes = [f"{name}: given twice" for name in repeated_keys]
    # Only one value of a repeated key was read, so checking it could be misleading.
    if not mistakes:
        mistakes = list(_find_mistakes(top))
    if mistakes:
        raise WebConfigError(mistakes)
    tls = top.get("tls_server_config")
    http = top.get("http_server_config") or {}
    users = top.get("basic_auth_users") or {}
    return WebConfig(
        tls=None if tls is None else _build_tls(tls, path.parent),
        headers=http.get("headers") or {},
        users={str(name): str(password_hash) for name, password_hash in users.items()},
    )


def _build_tls(tls: Mapping[str, Any], folder: Path) -> Tls:
    """Return the TLS settings in a valid section; `folder` is the file's folder."""
    files: dict[str, Any] = {}
    # Paths are relative to the file, as in Prometheus's own configuration.
    for name in _FILE_KEYS:
        if tls.get(name):
            files[name] = folder / tls[name]
    return Tls(
        **files,
        client_auth=_choose(tls, "client_auth_type"),
        client_allowed_sans=tuple(map(str, tls.get("client_allowed_sans") or ())),
        min_version=_choose(tls, "min_version"),
        max_version=_choose(tls, "max_version"),
    )


def _choose(tls: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - a value of the table
    """Return the meaning of this key's value.

    If the key has no value, returns the meaning of the default. Returns None if the value is not
    one of the accepted ones.
    """
    choice = _CHOICES[name]
    value = tls.get(name)
    # As in the exporter-toolkit, a key without a value (null) counts as missing.
    if value is None:
        value = choice.default
    if not isinstance(value, str):
        return None
    return choice.meanings.get(value)


def _find_mistakes(top: object) -> Iterator[str]:
    """Yield a line for each mistake.

    A key without a value counts as missing. Any other empty value, such as [], is a mistake where a
    mapping is expected.
    """
    yield from _check_keys(_WHOLE_FILE, top)
    sections = top if isinstance(top, dict) else {}
    for name, check in (("tls_server_config", _check_tls), ("http_server_config", _check_http)):
        section = sections.get(name)
        yield from _check_keys(name, section)
        if isinstance(section, dict):
            yield from check(section)
    yield from _check_users(sections.get("basic_auth_users"))


def _check_keys(section_name: str, section: object) -> Iterator[str]:
    """Yield a line for each refused or unknown key in a section.

    Yields nothing if the section is missing. If the section is not a mapping, a single line is
    yielded.
    """
    if section is None:
        return
    is_whole_file = section_name == _WHOLE_FILE
    if not isinstance(section, dict):
        yield f"{'the file' if is_whole_file else section_name}: not a mapping"
        return
    for key in section:
        path = f"{key}" if is_whole_file else f"{section_name}.{key}"
        if key in _REFUSED_KEYS:
            yield f"{path}: not kept here: {_REFUSED_KEYS[key]}"
        elif key not in _KEYS[section_name]:
            yield f"{path}: not a key, accepts {', '.join(_KEYS[section_name])}"


def _check_tls(tls: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each wrong value, then one for each pair of contradictory keys."""
    for name in _FILE_KEYS:
        path = tls.get(name)
        is_path = isinstance(path, str) and path.isprintable()
        if path and not is_path:
            yield f"tls_server_config.{name}: not the path of a file"
    for name, choice in _CHOICES.items():
        # None means that the value is not one of the choices. A missing value means the default.
        if _choose(tls, name) is None:
            value = show_value(tls[name])
            accepted = ", ".join(filter(None, choice.meanings))
            yield f"tls_server_config.{name}: got {value}, accepts {accepted}"
    if not isinstance(tls.get("client_allowed_sans"), list | None):
        yield "tls_server_config.client_allowed_sans: not a list of names"
    yield from _check_tls_agreement(tls)


def _check_tls_agreement(tls: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each missing key that another key requires, and for each contradiction."""
    client_auth = _choose(tls, "client_auth_type")
    has_authority = bool(tls.get("client_ca_file"))
    if client_auth and not has_authority:
        yield "tls_server_config.client_ca_file: missing, and client_auth_type needs it"
    if client_auth is ssl.CERT_NONE and has_authority:
        problem = "missing, and without it no certificate is requested"
        yield f"tls_server_config.client_auth_type: {problem}"
    lowest_version = _choose(tls, "min_version")
    highest_version = _choose(tls, "max_version")
    # A refused version is None here. The line about the refused version has already been yielded.
    if lowest_version and highest_version and lowest_version > highest_version:
        yield "tls_server_config.max_version: below min_version, which lets nobody in"
    if not (tls.get("cert_file") and tls.get("key_file")):
        yield "tls_server_config: cert_file and key_file are both needed"


def _check_http(http: dict[str, Any]) -> Iterator[str]:
    """Yield a line if HTTP/2 is enabled, and for each wrong header."""
    if http.get("http2") is True:
        problem = "HTTP/2 is not spoken here: leave it out, or set it to false"
        yield f"http_server_config.http2: {problem}"
    headers = http.get("headers")
    if headers is None:
        return
    if not _is_mapping_to_texts(headers):
        yield "http_server_config.headers: not a mapping of names to texts"
        return
    for name, value in headers.items():
        if name not in HEADERS:
            accepted = ", ".join(HEADERS)
            yield f"http_server_config.headers.{name}: not a header, accepts {accepted}"
        # A line break in the value would start another header.
        if not (value.isascii() and value.isprintable()):
            yield f"http_server_config.headers.{name}: HTTP cannot carry its value"


def _is_mapping_to_texts(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(entry, str) for entry in value.values())


def _check_users(users: object) -> Iterator[str]:
    """Yield a line for each user without a bcrypt hash, if there are any users."""
    if users is None:
        return
    if not isinstance(users, dict):
        yield "basic_auth_users: not a mapping of names to bcrypt hashes"
        return
    for name, password_hash in users.items():
        if not isinstance(name, str):
            # YAML reads `yes` as true, 007 as 7 and `~` as null. A user name without quotes could
            # therefore differ from the intended one.
            yield f"basic_auth_users.{name}: not a text, write the name in quotes"
        elif not _BCRYPT.fullmatch(str(password_hash)):
            advice = "make one with htpasswd -nBC 10 ''"
            yield f"basic_auth_users.{name}: not a bcrypt hash of cost 4 to 16, {advice}"
