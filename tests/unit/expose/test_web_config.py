"""web.config.yml: what it means, and what is reported about what cannot be kept."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from vllm_headroom.expose.web import door
from vllm_headroom.expose.web.config import CLIENT_AUTH, HEADERS, WebConfig, WebConfigError, read_web_config
from vllm_headroom.yaml_file import MAX_FILE_BYTES, MOST_ENTRIES

HASH = "$2y$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "web.config.yml"


def read(file: Path, text: str) -> WebConfig:
    file.write_text(text)
    return read_web_config(file)


def test_an_empty_file_asks_for_nothing(file: Path) -> None:
    assert read(file, "") == WebConfig()


def test_paths_are_relative_to_the_file(file: Path) -> None:
    tls = read(
        file,
        "tls_server_config:\n  cert_file: a.crt\n  key_file: /k/a.key\n  client_ca_file: ca.crt\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [prometheus]\n  min_version: TLS13\n",
    ).tls

    assert tls is not None
    assert (tls.cert_file, tls.key_file, tls.client_ca_file) == (
        file.parent / "a.crt",
        Path("/k/a.key"),
        file.parent / "ca.crt",
    )
    assert (tls.client_auth, tls.min_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)
    assert tls.client_allowed_sans == ("prometheus",)


def test_a_key_without_a_value_counts_as_missing(file: Path) -> None:
    tls = read(file, "tls_server_config:\n  cert_file: a\n  key_file: b\n  min_version:\n").tls

    assert tls is not None
    assert tls.min_version == ssl.TLSVersion.TLSv1_2


def test_users_are_no_part_of_what_is_shown(file: Path) -> None:
    config = read(file, f"basic_auth_users:\n  alice: {HASH}\n")

    assert config.users == {"alice": HASH}
    assert HASH not in repr(config)


BOMB = "\n".join(
    (f"a0: &a0 {['x'] * 10}", *(f"a{n}: &a{n} {[f'*a{n - 1}'] * 10}".replace("'", "") for n in range(1, 9)))
)
"""A gigabyte, where aliases are read."""


def test_an_error_while_it_is_read_again_leaves_the_last_version_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    own = door.Door(file)
    loaded = own.loaded

    def fail(*_: object) -> None:
        raise IndexError("range")

    async def watch() -> None:
        watching = asyncio.create_task(own.watch(lambda: None))
        while own.problem is None:
            assert not watching.done()
            await asyncio.sleep(0)
        watching.cancel()

    monkeypatch.setattr(door, "RELOAD_SECONDS", 0.0)
    monkeypatch.setattr(door, "_reload", fail)
    asyncio.run(watch())

    assert own.loaded is loaded
    assert own.problem == "it cannot be understood (IndexError)"


TOO_MANY = f"it is not YAML (more than {MOST_ENTRIES} lines and commas are not read)"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a", "the file: not a mapping"),
        ("{", "it is not YAML, line 1 (expected the node content, but found '<stream end>')"),
        (BOMB, "it is not YAML, line 2 (an alias is not read here, write its value out)"),
        ("[" * 5000, "it is not YAML (nested too deep)"),
        ("#" * (MAX_FILE_BYTES + 1), "it cannot be read (File too large)"),
        ("a: 2026-99-99", "it is not YAML (it is no text in UTF-8)"),
        (f"basic_auth_users: {{alice: {HASH}}}\nbasic_auth_users: {{}}", "basic_auth_users: given twice"),
        ("http_server_config: {headers: {X-Frame-Options: a, X-Frame-Options: b}}", "X-Frame-Options: given twice"),
        ("basic_auth_users: []", "basic_auth_users: not a mapping of names to bcrypt hashes"),
        ("basic_auth_users: false", "basic_auth_users: not a mapping of names to bcrypt hashes"),
        ("http_server_config: 0", "http_server_config: not a mapping"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: [TLS12]}",
            "tls_server_config.min_version: got ['TLS12'], accepts TLS12, TLS13",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "tls_server_config.max_version: below min_version, which lets nobody in",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_allowed_sans: prometheus}",
            "tls_server_config.client_allowed_sans: not a list of names",
        ),
        ("tls_config: {}", "tls_config: not a key, accepts tls_server_config, http_server_config, basic_auth_users"),
        ("rate_limit: {}", "rate_limit: not kept here: the number of connections is bounded in any case"),
        (
            "http_server_config: {http2: true}",
            "http_server_config.http2: HTTP/2 is not spoken here: leave it out, or set it to false",
        ),
        (
            "http_server_config: {headers: {X-Own: a}}",
            "http_server_config.headers.X-Own: not a header, accepts " + ", ".join(HEADERS),
        ),
        (
            "basic_auth_users: {alice: pa55word}",
            "basic_auth_users.alice: not a bcrypt hash of cost 4 to 16, make one with htpasswd -nBC 10 ''",
        ),
        (
            f"basic_auth_users: {{alice: {HASH[:4]}31{HASH[6:]}}}",
            "basic_auth_users.alice: not a bcrypt hash of cost 4 to 16, make one with htpasswd -nBC 10 ''",
        ),
        (f"basic_auth_users: {{~: {HASH}}}", "basic_auth_users.None: not a text, write the name in quotes"),
        (f"basic_auth_users: {{yes: {HASH}}}", "basic_auth_users.True: not a text, write the name in quotes"),
        (f"basic_auth_users: {{007: {HASH}}}", "basic_auth_users.7: not a text, write the name in quotes"),
        ("\n".join(f"k{number}: 1" for number in range(MOST_ENTRIES + 2)), TOO_MANY),
        (f"a: [{'1,' * (MOST_ENTRIES + 1)}]", TOO_MANY),
        ("tls_server_config: {cert_file: a}", "tls_server_config: cert_file and key_file are both needed"),
        (
            "tls_server_config: {cert_file: a, key_file: b, cipher_suites: [X]}",
            "tls_server_config.cipher_suites: not kept here: those of OpenSSL's default are offered",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}",
            "tls_server_config.min_version: got 'TLS10', accepts TLS12, TLS13",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "tls_server_config.client_auth_type: got 'RequireAnyClientCert', accepts "
            + ", ".join(CLIENT_AUTH).strip(", "),
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "tls_server_config.client_ca_file: missing, and client_auth_type needs it",
        ),
        ("a: !!timestamp x", "it is not YAML (it is no text in UTF-8)"),
        (
            'tls_server_config: {cert_file: "a\\0", key_file: b}',
            "tls_server_config.cert_file: not the path of a file",
        ),
        (
            'http_server_config: {headers: {X-Frame-Options: "\N{SNOWMAN}"}}',
            "http_server_config.headers.X-Frame-Options: HTTP cannot carry its value",
        ),
    ],
)
def test_a_mistake_is_one_line(file: Path, text: str, line: str) -> None:
    with pytest.raises(WebConfigError) as raised:
        read(file, text)

    assert raised.value.lines == (line,)


def test_a_file_that_is_missing_says_so(file: Path) -> None:
    with pytest.raises(WebConfigError, match="cannot be read"):
        read_web_config(file)
