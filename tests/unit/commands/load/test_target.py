from __future__ import annotations

import asyncio
import gzip
import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.fakes import engine_server
from tests.fakes.certificates import server_context, verify_strictly, write_self_signed, write_without_extensions
from tests.fakes.engine_server import LOOPBACK, EngineServer
from tests.fakes.ports import free_port
from tests.fakes.streaming_server import StreamingServer
from tests.unit.commands.load.asking import run
from vllm_headroom.scrape.http.failures import load_trust
from vllm_headroom.scrape.http.reader import find_port
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.load.order import join_path, parse_base_url
from vllm_headroom_tools.load.prompts import CompletionApi
from vllm_headroom_tools.load.target import MOST_LIST_BYTES, Target, fetch_model, find_target
from vllm_headroom_tools.openai import ListedModel


def problem(url: str, *, ca_file: Path | None = None) -> str:
    """Return why nothing is found at a URL, or no model."""

    async def steps() -> None:
        base = parse_base_url(url)
        tls = load_trust(ca_file) if base.scheme == "https" else None
        await fetch_model(base, await find_target(base, CompletionApi.CHAT, tls, None))

    with pytest.raises(BadInput) as error:
        run(steps)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "base", "port"),
    [
        ("http://engine:8000", "http://engine:8000", 8000),
        ("http://engine:8000/", "http://engine:8000", 8000),
        ("http://engine:8000/v1", "http://engine:8000", 8000),
        ("https://gateway/llama/v1/", "https://gateway/llama", 443),
        ("http://[::1]", "http://[::1]", 80),
    ],
)
def test_an_address_is_taken_as_clients_of_openai_write_it(text: str, base: str, port: int) -> None:
    url = parse_base_url(text)

    assert str(join_path(url, "/metrics")) == f"{base}/metrics"
    assert find_port(url) == port


BAD_URLS = ("", "engine:8000", "ftp://engine", "http://", "http://u:p@engine", "http://e?q", "http://a b")


@pytest.mark.parametrize("text", BAD_URLS)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the option has the words
        parse_base_url(text)


def test_the_server_is_found_with_its_model() -> None:
    async def steps() -> tuple[Target, ListedModel]:
        url = parse_base_url(f"{server.url}/some/v1")
        target = await find_target(url, CompletionApi.CHAT, None, "secret")
        return target, await fetch_model(parse_base_url(server.url), target)

    with StreamingServer(token="secret") as server:
        target, model = run(steps)

    assert target.address == (LOOPBACK, server.port)
    assert target.path == "/some/v1/chat/completions"
    assert ("Host", f"{LOOPBACK}:{server.port}") in target.headers
    assert ("Authorization", "Bearer secret") in target.headers
    assert model == ListedModel(name="tiny", max_tokens=4096)


def test_a_host_with_several_addresses_is_found_at_the_one_that_answers() -> None:
    with StreamingServer() as server:
        result = run(
            lambda: find_target(
                parse_base_url(f"http://localhost:{server.port}"), CompletionApi.COMPLETIONS, None, None
            )
        )

    assert result.address == (LOOPBACK, server.port)


def test_a_server_that_wants_a_token_is_reported() -> None:
    with StreamingServer(token="secret") as server:
        problem_text = problem(server.url)

    assert problem_text == (
        f"{server.url}/v1/models answers 401: name a --model, or an --engine-bearer-token-file if it asks for one"
    )


def test_what_is_not_there_is_one_line() -> None:
    port = free_port()

    assert problem(f"http://{LOOPBACK}:{port}").startswith(
        f"no connection to http://{LOOPBACK}:{port} (Connection refused): check"
    )
    assert problem("http://no.such.host.invalid").startswith(
        "the host of http://no.such.host.invalid cannot be resolved"
    )


@pytest.mark.parametrize("listed", ["no json", "[]", "{}", '{"data": []}', '{"data": [{}]}', '{"data": 3}'])
def test_a_server_that_lists_no_model_needs_a_name(listed: str) -> None:
    with EngineServer(engine_server.page(listed)) as server:
        base = f"http://{LOOPBACK}:{server.port}"

        assert problem(base) == f"{base}/v1/models: lists no model: name a --model"


def test_a_list_of_models_without_an_end_is_not_read_to_it() -> None:
    listed = (json.dumps({"data": [{"id": "m"}]}) + " " * MOST_LIST_BYTES).encode()
    packed = engine_server.with_head(gzip.compress(listed), headers=("Content-Encoding: gzip",))
    for answer in (engine_server.with_head(listed), packed):
        with EngineServer(engine_server.cut(answer)) as server:
            assert problem(f"http://{LOOPBACK}:{server.port}").endswith("/v1/models: lists no model: name a --model")


def test_a_server_that_hangs_up_is_one_line() -> None:
    with EngineServer(engine_server.cut(b"")) as server:
        base = f"http://{LOOPBACK}:{server.port}"

        assert problem(base).startswith(f"{base}/v1/models hung up")


def test_a_model_without_a_length_has_none() -> None:
    with EngineServer(engine_server.page(json.dumps({"data": [{"id": "m", "max_model_len": None}]}))) as server:
        url = httpx.URL(f"http://{LOOPBACK}:{server.port}")

        async def steps() -> ListedModel:
            return await fetch_model(url, await find_target(url, CompletionApi.CHAT, None, None))

        model = run(steps)

    assert model == ListedModel(name="m", max_tokens=None)


def test_certificates_are_checked(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    with StreamingServer(tls=server_context(certificate, key)) as server:
        base = parse_base_url(server.url)

        async def steps() -> ListedModel:
            tls = load_trust(certificate)
            target = await find_target(base, CompletionApi.CHAT, tls, None)
            assert target.tls is tls
            return await fetch_model(base, target)

        assert run(steps).name == "tiny"
        assert "certificate verify failed" in problem(server.url)


def test_an_authority_without_extensions_is_good_on_every_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, certificate, key = write_without_extensions(tmp_path)
    verify_strictly(monkeypatch)
    with StreamingServer(tls=server_context(certificate, key)) as server:
        base = parse_base_url(server.url)

        async def steps() -> ListedModel:
            return await fetch_model(base, await find_target(base, CompletionApi.CHAT, load_trust(authority), None))

        assert run(steps).name == "tiny"


def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_headroom_tools.load.target.FIRST_ANSWER_SECONDS", 0.2)
    with socket.create_server((LOOPBACK, 0), backlog=0) as silent:
        full = socket.create_connection(silent.getsockname())
        problem_text = problem(f"http://{LOOPBACK}:{silent.getsockname()[1]}")
        full.close()

    assert "sent no complete page within 0.2 s: check that vLLM serves there" in problem_text


def test_waiting_for_a_host_can_be_cancelled() -> None:
    async def steps() -> None:
        with socket.create_server((LOOPBACK, 0), backlog=0) as silent, socket.create_connection(silent.getsockname()):
            finding = asyncio.create_task(
                find_target(
                    parse_base_url(f"http://{LOOPBACK}:{silent.getsockname()[1]}"), CompletionApi.CHAT, None, None
                )
            )
            await asyncio.sleep(0)
            finding.cancel()
            await asyncio.wait([finding])
            assert finding.cancelled()

    run(steps)
