from __future__ import annotations

import gzip
import tracemalloc
import zlib
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from tests.fakes.certificates import server_context, verify_strictly, write_self_signed, write_without_extensions
from tests.fakes.engine_server import EngineServer, cut, page
from tests.fakes.ports import free_port
from tests.fakes.prometheus_server import Answer, PrometheusServer, matrix, problem
from tests.unit.commands.replay.prometheus.history import lazily
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.replay.prometheus.api import PrometheusApi, TimeSpan

SPAN = TimeSpan(start_ms=1_760_000_000_000, end_ms=1_760_000_060_500, step_ms=15_000)


def refusal(url: str, **options: Path) -> str:
    """Return why a query failed."""
    with pytest.raises(BadInput) as caught, closing(PrometheusApi(httpx.URL(url), **options)) as api:
        api.query_range("up", SPAN)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_query_is_posted_below_the_path_of_the_url() -> None:
    with PrometheusServer(answer=matrix([({"__name__": "up", "job": "a"}, [(1_760_000_000.5, 2.0)])])) as server:
        with closing(PrometheusApi(httpx.URL(f"{server.url}/prometheus/?tab=1"))) as api:
            series_list = api.query_range("up", SPAN)

        assert [(series.name, series.labels, series.values) for series in series_list] == [
            ("up", {"job": "a"}, {1_760_000_000_500: 2.0})
        ]
        assert server.paths == ["/prometheus/api/v1/query_range"]
        assert server.forms == [{"query": "up", "start": "1760000000.000", "end": "1760000060.500", "step": "15.000"}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (problem("parse error: no\nsuch thing"), " answers 400 Bad Request to a query: parse error: no such thing"),
        (
            (401, {}, b"Unauthorized\n"),
            " answers 401 Unauthorized: give a token with the right to query by --bearer-token-file",
        ),
        (
            (404, {}, b"404 page not found\n"),
            " answers 404 Not Found and not as Prometheus does: --from-prometheus takes the URL in front of",
        ),
        (
            (200, {}, b"<html>"),
            " answers 200 OK and not as Prometheus does: --from-prometheus takes the URL in front of",
        ),
        (
            (302, {"Location": "/login"}, b""),
            " answers 302 Found, a redirect to a login or another address: give the address of Prometheus itself",
        ),
        ((503, {}, b""), " answers 503 Service Unavailable: it is overloaded or starting, try again later"),
        ((200, {}, b"[1]"), " answers 200 OK and not as Prometheus does: --from-prometheus takes"),
        (
            (200, {}, b'{"status": "success", "data": {"result": [{"metric": {}, "values": [["1e400", "1"]]}]}}'),
            " does not answer a range query with a range: check that it is Prometheus",
        ),
        (
            (200, {}, b'{"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}}'),
            " does not answer a range query with a range: check that it is Prometheus",
        ),
        (
            (200, {}, b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": 7}]}}'),
            " does not answer a range query with a range: check that it is Prometheus",
        ),
        (matrix([], warnings=["store b is away"]), ' has only part of this history: ["store b is away"]'),
    ],
    ids=str,
)
def test_an_answer_that_is_no_history_is_reported_in_one_line(answer: Answer, message: str) -> None:
    with PrometheusServer(answer=answer) as server:
        refusal_text = refusal(server.url)

        assert refusal_text.startswith(f"{server.url}{message}")


def test_the_phrase_of_a_refusal_which_may_quote_a_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BaseHTTPRequestHandler.responses, HTTPStatus.FORBIDDEN, ("no right for s3cret", ""))
    with PrometheusServer(answer=(403, {}, b"")) as server:
        refusal_text = refusal(server.url)

    assert "s3cret" not in refusal_text
    assert " answers 403 Forbidden: give a token" in refusal_text


GZIP = {"Content-Encoding": "gzip"}
MATRIX = matrix([({"__name__": "up"}, [(1_760_000_000.5, 2.0)])])[2]


def test_an_answer_may_be_packed() -> None:
    with (
        PrometheusServer(answer=(200, GZIP, gzip.compress(MATRIX))) as server,
        closing(PrometheusApi(httpx.URL(server.url))) as api,
    ):
        (series,) = api.query_range("up", SPAN)

        assert series.values == {1_760_000_000_500: 2.0}
        assert server.heads[0]["Accept-Encoding"] == "gzip"


def test_what_unpacks_to_more_than_memory_holds_is_not_unpacked() -> None:
    bomb = gzip.compress(MATRIX + b" " * 2**28)
    tracemalloc.start()
    with PrometheusServer(answer=(200, GZIP, bomb)) as server:
        refusal_text = refusal(server.url)
        _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert refusal_text.removeprefix(server.url) == (
        " answers a query with more than 128 MiB: ask for less, by a larger --step or a narrower --match"
    )
    assert peak_bytes < 2**29


@pytest.mark.parametrize(
    ("encoding", "body", "problem"),
    [
        ("gzip", MATRIX, "Error -3 while decompressing data: incorrect header check"),
        ("gzip, gzip", gzip.compress(gzip.compress(MATRIX)), "it is not gzip"),
        ("deflate", zlib.compress(MATRIX), "it is not gzip"),
    ],
)
def test_what_cannot_be_unpacked_or_might_have_no_end_is_reported(encoding: str, body: bytes, problem: str) -> None:
    with PrometheusServer(answer=(200, {"Content-Encoding": encoding}, body)) as server:
        refusal_text = refusal(server.url)

        assert (
            refusal_text == f"the answer of {server.url} cannot be unpacked ({problem}): check the proxy in front of it"
        )


def test_a_port_where_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    assert refusal(url) == f"no connection to {url} (Connection refused): check that it runs there"


def test_a_server_that_hangs_up() -> None:
    with EngineServer(cut(b"")) as server:
        url = server.url.removesuffix("/metrics")

        refusal_text = refusal(url)

    assert (
        refusal_text == f"{url} hung up or broke HTTP before it answered: check the port, and https if it serves that"
    )


def test_user_and_password_are_sent_and_never_shown() -> None:
    with PrometheusServer(answer=(404, {}, b"")) as server:
        refusal_text = refusal(server.url.replace("//", "//user:secret@"))

        assert refusal_text.startswith(server.url)
        assert server.heads[0]["Authorization"] == "Basic dXNlcjpzZWNyZXQ="


def test_a_token_stands_in_for_them(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken\n")
    with PrometheusServer(answer=matrix([])) as server:
        with closing(
            PrometheusApi(httpx.URL(server.url.replace("//", "//user:secret@")), bearer_token_file=file)
        ) as api:
            api.query_range("up", SPAN)

        assert server.heads[0]["Authorization"] == "Bearer t0ken"


def test_a_token_file_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "token"

    assert (
        refusal("http://p", bearer_token_file=file)
        == f"the token file {file} cannot be read (No such file or directory): make it readable for this user"
    )
    file.write_text("two words")
    assert refusal("http://p", bearer_token_file=file) == (
        f"the token file {file} is empty or holds more than a token: write one token to it"
    )


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"status": ' + b"9" * 5000 + b"}"], ids=["nested", "digits"])
def test_json_that_python_refuses_is_no_history(body: bytes) -> None:
    with PrometheusServer(answer=(200, {}, body)) as server:
        assert "answers 200 OK and not as Prometheus does" in refusal(server.url)


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://prometheus", "http://", "http://a:x"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadOptions) as caught:
        lazily(url)

    hint = " (did you mean http://prometheus:9090?)" if url == "prometheus:9090" else ""
    why = f"got {url!r}{hint}, accepts an http or https URL such as http://prometheus:9090"
    assert caught.value.lines == (f"--from-prometheus: {why}",)


def test_an_authority_of_ones_own_is_needed_and_taken(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    body = matrix([])[2].decode()
    with EngineServer(page(body), tls=server_context(certificate, key)) as server:
        url = server.url.removesuffix("/metrics")
        with closing(PrometheusApi(httpx.URL(url), ca_file=certificate)) as api:
            assert api.query_range("up", SPAN) == []

        refusal_text = refusal(url)

    assert refusal_text.startswith(f"TLS with {url} failed (")
    assert refusal_text.endswith("): give its CA with --ca-file, or use http")


def test_an_authority_without_extensions_is_good_on_every_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, certificate, key = write_without_extensions(tmp_path)
    verify_strictly(monkeypatch)
    with EngineServer(page(matrix([])[2].decode()), tls=server_context(certificate, key)) as server:
        url = server.url.removesuffix("/metrics")
        with closing(PrometheusApi(httpx.URL(url), ca_file=authority)) as api:
            assert api.query_range("up", SPAN) == []


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")

    assert refusal("https://p", ca_file=file).endswith("make it a readable file of PEM certificates")


def test_nothing_is_asked_before_the_first_record_is() -> None:
    lazily("http://nowhere", "--start", "-1h")
