import json
import re
from pathlib import Path

import pytest

from tests.fakes.engine_server import Answer, cut, drip, hang, page, reset, with_head
from tests.unit.commands.smoke.serving import CHAT, COMPLETION, Vllm, error
from tests.unit.commands.smoke.smoking import smoke
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import SmokeStep

pytestmark = pytest.mark.usefixtures("nvml")


def completion(vllm: Vllm, *words: str) -> SmokeStep:
    return smoke(vllm.url, *words)["completion"]


def test_the_first_model_completes_a_prompt(vllm: Vllm) -> None:
    step = completion(vllm)

    assert step.verdict is Conclusion.GOOD
    assert re.match(r"tiny gave 8 tokens in \d+\.\d", step.text)
    assert vllm.bodies == [("/v1/completions", {"model": "tiny", "max_tokens": 8, "temperature": 0, "prompt": "Hello"})]


@pytest.mark.parametrize("status", ["404 Not Found", "400 Bad Request"])
def test_a_model_that_has_only_chat_is_asked_by_chat(vllm: Vllm, status: str) -> None:
    vllm.answers["/v1/completions"] = error(status, "The model does not support Completions API")
    vllm.answers["/v1/chat/completions"] = page(CHAT)

    assert completion(vllm).verdict is Conclusion.GOOD
    assert vllm.bodies[-1][1]["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            error("500 Internal Server Error", "CUDA out of memory. Tried to allocate 2.00 GiB"),
            "answers 500 (CUDA out of memory. Tried to allocate 2.00 GiB): lower --gpu-memory-utilization: the",
        ),
        (
            page("Internal Server\nError\x1b[31m", status="500 Internal Server Error"),
            "answers 500 (Internal Server\nError\x1b[31m): look for the cause in the engine's log",
        ),
        (page("", status="503 Service Unavailable"), "/v1/completions answers 503: look for the cause"),
        (
            error("401 Unauthorized", "Unauthorized"),
            "answers 401 (Unauthorized): set HEADROOM_ENGINE_BEARER_TOKEN_FILE",
        ),
        (error("404 Not Found", "no such thing"), "/v1/completions answers 404 (no such thing): look for the cause"),
        (page('{"choices": []}'), 'answers 200 without a completion ({"choices": []}): check that HEADROOM_ENGINE_URL'),
        (page("<html>"), "answers 200 without a completion (<html>)"),
        (page("[" * 100_000), "answers 200 without a completion ([[["),
        (
            cut(with_head(COMPLETION.encode()[:20], length=200)),
            "/v1/completions hung up in the middle of the completion: look for a crash in the engine's log",
        ),
        (cut(b""), "/v1/completions hung up in the middle of the completion"),
        (reset, "/v1/completions hung up in the middle of the completion"),
        (page("x" * 9_000_000), "larger than 4194304 bytes"),
    ],
    ids=["oom", "500", "503", "401", "404", "no-choice", "html", "deep", "cut", "eof", "reset", "large"],
)
def test_anything_else_fails_in_the_servers_words_and_with_what_to_do(vllm: Vllm, answer: Answer, words: str) -> None:
    vllm.answers["/v1/completions"] = answer

    step = completion(vllm)

    assert step.verdict is Conclusion.NOT_GOOD
    assert words in step.text


@pytest.mark.parametrize("answer", [hang, drip("x" * 9999)], ids=["nothing", "a byte at a time"])
def test_a_completion_that_stalls_fails_at_its_deadline(vllm: Vllm, answer: Answer) -> None:
    vllm.answers["/v1/completions"] = answer

    step = completion(vllm, "--completion-deadline", "0.5s")

    assert step.verdict is Conclusion.NOT_GOOD
    assert "/v1/completions did not answer within 0." in step.text
    assert step.text.endswith("look for a hang in vLLM's log")


@pytest.mark.parametrize("body", ["{}", '{"data": []}', '{"data": [{"id": 5}]}', "no json"])
def test_a_server_without_a_model_fails(vllm: Vllm, body: str) -> None:
    vllm.answers["/v1/models"] = page(body)

    step = completion(vllm)

    assert step.verdict is Conclusion.NOT_GOOD
    assert "/v1/models lists no model: check that HEADROOM_ENGINE_URL names vLLM's own port" in step.text


def test_the_models_name_may_hold_anything(vllm: Vllm) -> None:
    vllm.answers["/v1/models"] = page(json.dumps({"data": [{"id": "a\x1b[2Jb"}]}))

    assert completion(vllm).text.startswith("a\x1b[2Jb gave 8 tokens")


def test_every_request_has_the_token_and_no_text_shows_a_password(vllm: Vllm, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    vllm.answers["/v1/completions"] = page("", status="500 Internal Server Error")

    steps = smoke(vllm.url.replace("//", "//user:hunter2@"), "--engine-bearer-token-file", str(token))

    assert all("authorization: bearer s3cret" in head.lower() for head in vllm.requests)
    assert not any("hunter2" in step.text or "s3cret" in step.text for step in steps.values())


def test_a_server_behind_a_prefix_is_asked_behind_it(vllm: Vllm) -> None:
    vllm.prefix = "/a"

    steps = smoke(vllm.url.replace("/metrics", "/a/metrics"), "--deadline", "10s")

    assert [step.verdict for step in steps.values()] == [Conclusion.GOOD] * 4
