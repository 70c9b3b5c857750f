from __future__ import annotations

import asyncio
import base64
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.certificates import (
    server_context,
    verify_strictly,
    write_self_signed,
    write_without_extensions,
)
from tests.fakes.engine_server import EngineServer, page
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http import reader
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import Reason


def fetches(reader: PageReader, *between: Any) -> list[str | Failure]:
    """Fetch, call the first of `between`, fetch, and so on."""

    async def run() -> list[str | Failure]:
        pages = [await reader.fetch()]
        for change in between:
            change()
            pages.append(await reader.fetch())
        await reader.close()
        return pages

    return asyncio.run(run())


def reasons(pages: list[str | Failure]) -> list[str | Reason]:
    return [answer.reason if isinstance(answer, Failure) else answer for answer in pages]


def authorizations(server: EngineServer) -> list[str]:
    lines = [line for head in server.requests for line in head.splitlines()]
    return [line.partition(": ")[2] for line in lines if line.lower().startswith("authorization: ")]


def test_the_token_is_read_for_each_page(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with EngineServer(page("a 1\n")) as server:
        reader = PageReader(url=server.url, timeout_seconds=30, bearer_token_file=token)
        pages = fetches(reader, lambda: token.write_text("second"), token.unlink, lambda: token.write_text("third"))

    assert reasons(pages) == ["a 1\n", "a 1\n", Reason.CREDENTIALS, "a 1\n"]
    assert authorizations(server) == ["Bearer first", "Bearer second", "Bearer third"]


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"with space", b"\xff\xfe"])
def test_a_file_that_holds_no_token_is_named_and_its_content_is_not(tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    with EngineServer(page("a 1\n")) as server:
        (problem,) = fetches(PageReader(url=server.url, timeout_seconds=30, bearer_token_file=token))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.CREDENTIALS
    assert problem.message == (f"the token file {token} is empty or holds more than a token: write one token to it")
    assert server.requests == []


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (problem,) = fetches(PageReader(url="http://127.0.0.1:1/", timeout_seconds=30, bearer_token_file=tmp_path))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.CREDENTIALS
    assert f"{tmp_path} cannot be read (Is a directory)" in problem.message


def test_the_urls_user_is_sent_and_gives_way_to_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with EngineServer(page("a 1\n")) as server:
        url = server.url.replace("://", "://us%20er:pa55@")
        fetches(PageReader(url=url, timeout_seconds=30))
        fetches(PageReader(url=url, timeout_seconds=30, bearer_token_file=token))

    assert authorizations(server) == ["Basic " + base64.b64encode(b"us er:pa55").decode(), "Bearer t"]


def test_a_header_that_http_cannot_carry_is_a_failure_that_does_not_show_it() -> None:
    with EngineServer(page("a 1\n")) as server:
        (problem,) = fetches(PageReader(url=server.url, timeout_seconds=30, headers={"X-Key": "k3y\n"}))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.CREDENTIALS
    assert "k3y" not in problem.message


def test_a_certificate_nobody_signed_is_refused(tmp_path: Path) -> None:
    with EngineServer(page("a 1\n"), tls=server_context(*write_self_signed(tmp_path))) as server:
        (problem,) = fetches(PageReader(url=server.url, timeout_seconds=30))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.TLS
    assert "self-signed certificate" in problem.message
    assert "set HEADROOM_ENGINE_CA_FILE" in problem.message


def test_the_ca_file_makes_a_certificate_good(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    with EngineServer(page("a 1\n"), tls=server_context(certificate, key)) as server:
        pages = fetches(PageReader(url=server.url, timeout_seconds=30, ca_file=certificate), lambda: None)

    assert pages == ["a 1\n", "a 1\n"]


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff\x00"])
def test_a_ca_file_that_cannot_be_used_is_named_and_tried_again(tmp_path: Path, content: bytes | None) -> None:
    certificate, key = write_self_signed(tmp_path)
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_bytes(content)
    with EngineServer(page("a 1\n"), tls=server_context(certificate, key)) as server:
        reader = PageReader(url=server.url, timeout_seconds=30, ca_file=ca_file)
        problem, answer = fetches(reader, lambda: shutil.copy(certificate, ca_file))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.CREDENTIALS
    assert f"the CA file {ca_file} cannot be used (" in problem.message
    assert answer == "a 1\n"


def test_a_renewed_ca_file_is_read_after_tls_failed(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    ca_file, _ = write_self_signed(tmp_path, "old")
    with EngineServer(page("a 1\n"), tls=server_context(certificate, key)) as server:
        reader = PageReader(url=server.url, timeout_seconds=30, ca_file=ca_file)
        pages = fetches(reader, lambda: shutil.copy(certificate, ca_file))

    assert reasons(pages) == [Reason.TLS, "a 1\n"]


def test_an_authority_without_extensions_is_good_on_every_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, certificate, key = write_without_extensions(tmp_path)
    verify_strictly(monkeypatch)
    with EngineServer(page("a 1\n"), tls=server_context(certificate, key)) as server:
        pages = fetches(PageReader(url=server.url, timeout_seconds=30, ca_file=authority))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        pages += fetches(PageReader(url=server.url, timeout_seconds=30))

    assert pages == ["a 1\n", "a 1\n"]


@pytest.mark.parametrize(
    ("certificate_fields", "sentence"),
    [
        ({"name": "127.0.0.2"}, "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ({"valid_hours": -1.0}, "certificate has expired"),
    ],
)
def test_name_and_time_are_verified_all_the_same(tmp_path: Path, certificate_fields: Any, sentence: str) -> None:
    authority, certificate, key = write_without_extensions(tmp_path, **certificate_fields)
    with EngineServer(page("a 1\n"), tls=server_context(certificate, key)) as server:
        (problem,) = fetches(PageReader(url=server.url, timeout_seconds=30, ca_file=authority))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.TLS
    assert sentence in problem.message


def test_https_to_a_plain_port_is_a_tls_failure() -> None:
    with EngineServer(page("a 1\n")) as server:
        pages = fetches(PageReader(url=server.url.replace("http:", "https:"), timeout_seconds=30))

    assert reasons(pages) == [Reason.TLS]


def test_http_to_a_tls_port_is_a_failure(tmp_path: Path) -> None:
    with EngineServer(page("a 1\n"), tls=server_context(*write_self_signed(tmp_path))) as server:
        pages = fetches(PageReader(url=server.url.replace("https:", "http:"), timeout_seconds=30))

    assert reasons(pages) == [Reason.INCOMPLETE]


def test_a_server_that_wants_a_client_certificate_is_a_tls_failure(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    context = server_context(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    with EngineServer(page("a 1\n"), tls=context) as server:
        pages = fetches(PageReader(url=server.url, timeout_seconds=30, ca_file=certificate))

    assert reasons(pages) == [Reason.TLS]


def test_a_reader_without_files_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may take longer than a file may."""
    monkeypatch.setattr(reader, "_FILE_SECONDS", 0.0)
    with EngineServer(page("a 1\n")) as server:
        assert fetches(PageReader(url=server.url, timeout_seconds=30)) == ["a 1\n"]


@pytest.mark.parametrize("token", ["hf_t0ken", "eyJhbGciOi.eyJz/dWIi.c2ln", "x" * 5000])
def test_a_token_in_place_of_its_files_name_is_not_shown(token: str) -> None:
    with EngineServer(page("a 1\n")) as server:
        (problem,) = fetches(PageReader(url=server.url, timeout_seconds=30, bearer_token_file=Path(token)))

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.CREDENTIALS
    assert token not in problem.message
