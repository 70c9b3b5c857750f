from __future__ import annotations

from pathlib import Path

import pytest

from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.load.command import COMMAND, read_order
from vllm_headroom_tools.load.order import Lengths, LoadOrder
from vllm_headroom_tools.load.prompts import CompletionApi
from vllm_headroom_tools.options import BadOptions

LEAST = ("--engine-url", "http://engine:8000", "--concurrency", "10")


def ordered(*words: str) -> LoadOrder:
    return read_order(build_parser(COMMAND, "load").read([*LEAST, *words]))


def test_what_is_not_said_is_bounded() -> None:
    load_order = ordered()

    assert str(load_order.page_url) == "http://engine:8000/metrics"
    assert (load_order.api, load_order.concurrency, load_order.model) == (CompletionApi.COMPLETIONS, 10, None)
    assert (load_order.seconds, load_order.grace_seconds, load_order.timeout_seconds) == (60, 30, 300)
    assert (load_order.prompt_tokens, load_order.output_tokens) == (
        Lengths(shortest=512, longest=512),
        Lengths(shortest=128, longest=128),
    )
    assert (load_order.shared_ratio, load_order.most_requests, load_order.requests_per_second, load_order.gpus) == (
        0,
        None,
        None,
        "auto",
    )
    assert load_order.trace.name.startswith("vllm-headroom-load-2")
    assert str(load_order) == "completions, prompts of about 512 tokens, answers of 128"


def test_everything_can_be_said() -> None:
    load_order = ordered(
        *("--api", "chat", "--model", "m", "--prompt-tokens", "256..2048", "--output-tokens", "64..512"),
        *("--shared-prefix", "30%", "--duration", "5m", "--grace", "2s", "--timeout", "90s", "--max-requests", "7"),
        *("--rate", "0.5", "--metrics-url", "http://pod:9000", "--gpus", "0,GPU-a", "--trace", "t.jsonl"),
        *("--engine-bearer-token-file", "token", "--engine-ca-file", "ca.pem"),
        *("--probe-dir", "/run/headroom-probe"),
    )

    assert str(load_order) == "chat, prompts of about 256..2048 tokens, 30% of them shared, answers of 64..512"
    assert (load_order.model, load_order.most_requests, load_order.requests_per_second) == ("m", 7, 0.5)
    assert (load_order.seconds, load_order.grace_seconds, load_order.timeout_seconds) == (300, 2, 90)
    assert str(load_order.page_url) == "http://pod:9000/metrics"
    assert load_order.gpus == ("0", "GPU-a")
    assert (load_order.trace, load_order.bearer_token_file, load_order.ca_file) == (
        Path("t.jsonl"),
        Path("token"),
        Path("ca.pem"),
    )
    assert load_order.probe_dir == Path("/run/headroom-probe")
    assert str(ordered("--image-size", "64x32")) == (
        "chat, prompts of about 512 tokens and an image of 64x32 pixels, answers of 128"
    )
    assert ordered("--gpus", "all").gpus == "all"
    assert ordered("--gpus", "auto").gpus == "auto"


@pytest.mark.parametrize(
    ("option", "value", "accepts"),
    [
        ("concurrency", "0", "a whole number from 1 to 1000000"),
        ("concurrency", "1000001", "a whole number from 1 to 1000000"),
        ("prompt-tokens", "9..3", "a number of tokens, or two such as 256..2048"),
        ("shared-prefix", "101%", "a share such as 5% or 0.05, at most 100%"),
        ("duration", "0", "a duration above 0 such as 90s, 5m or 1h"),
        ("rate", "nan", "a number above 0"),
        ("rate", "1_0", "a number above 0"),
        ("rate", "inf", "a number above 0"),
        ("max-requests", "²", "a whole number from 1 on"),
        ("gpus", "one", "auto, all, or GPU indices or UUIDs separated by commas"),
        ("metrics-url", "x", "an http or https URL such as http://127.0.0.1:8000"),
        ("api", "talk", "completions or chat"),
        ("image-size", "1280", "width and height in pixels, such as 1280x720"),
        ("image-size", "0x9", "width and height in pixels, such as 1280x720"),
        ("image-size", "99999x99999", "width and height in pixels, such as 1280x720"),
    ],
)
def test_what_is_not_understood_is_one_line(option: str, value: str, accepts: str) -> None:
    required_options = () if option == "concurrency" else ("--concurrency", "1")
    with pytest.raises(BadOptions) as refused:
        build_parser(COMMAND, "load").read(["--engine-url", "http://e", *required_options, f"--{option}", value])

    assert refused.value.lines == (f"--{option}: got {value!r}, accepts {accepts}",)


def test_a_server_is_never_a_default_and_its_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_ENGINE_URL", "http://e")
    url = "an http or https URL without user, password and query"
    shown = {
        "http://me:secret@e": "http://***@e",
        "http://me:se?cret@e": "http://***",
        "http://me:secret@e?token": "http://***@e?***",
    }
    refusals = [(("--engine-url", url), f"got {shown_url!r}") for url, shown_url in shown.items()]
    for words, why in (((), "needed"), *refusals):
        with pytest.raises(BadOptions) as refused:
            build_parser(COMMAND, "load").read(["--concurrency", "1", *words])

        assert refused.value.lines == (f"--engine-url: {why}, accepts {url}",)
