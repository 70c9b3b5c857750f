from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.load.prompts import (
    RING_WORDS,
    WORDS,
    CompletionApi,
    build_prompt_maker,
    build_request_body,
    draw_image,
    read_prompts,
)


def prompts(shared_ratio: float = 0.0) -> Callable[[int], str]:
    return build_prompt_maker(shared_ratio, Random(4))  # noqa: S311 - not for secrets


@pytest.mark.parametrize("shared_ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("words", [1, 5, RING_WORDS - 1, 3 * RING_WORDS])
def test_a_prompt_has_so_many_words(words: int, shared_ratio: float) -> None:
    prompt = prompts(shared_ratio)(words).split()

    assert len(prompt) == words
    assert set(prompt) <= set(WORDS)


def test_the_share_is_the_beginning_of_every_prompt_and_the_rest_of_none() -> None:
    prompt_list = prompts(0.25)
    all_words = [prompt_list(400).split() for _ in range(1000)]

    assert len({tuple(words[:100]) for words in all_words}) == 1
    assert len({tuple(words[100:105]) for words in all_words}) == 1000
    assert prompt_list(200).split()[:50] == all_words[0][:50]


def test_without_a_share_no_prompt_begins_as_another() -> None:
    prompt_list = prompts()

    assert len({prompt_list(16)[:20] for _ in range(1000)}) > 990


def test_what_is_shared_whole_is_the_same_prompt() -> None:
    prompt_list = prompts(1.0)

    assert prompt_list(64) == prompt_list(64)


@pytest.mark.parametrize(
    ("api", "prompt_body"),
    [
        (CompletionApi.COMPLETIONS, {"prompt": "one two"}),
        (CompletionApi.CHAT, {"messages": [{"role": "user", "content": "one two"}]}),
    ],
)
def test_the_body_asks_for_a_stream_of_so_many_tokens_with_the_servers_count(
    api: CompletionApi, prompt_body: dict[str, object]
) -> None:
    assert json.loads(build_request_body(api, "tiny", "one two", 9)) == prompt_body | {
        "model": "tiny",
        "max_tokens": 9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


SHARED = [
    {"id": "a", "conversations": [{"from": "human", "value": "first"}, {"from": "gpt", "value": "an answer"}]},
    {"id": "b", "conversations": []},
    {"conversations": [{"role": "user", "content": "second"}]},
    7,
]


@pytest.mark.parametrize(
    ("content", "expected_prompts"),
    [
        (json.dumps(SHARED), ("first", "second")),
        ('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n\n', ("one", "two")),
        ("a line\nanother\n", ("a line", "another")),
        ('["x", "y"]', ("x", "y")),
    ],
)
def test_prompts_are_taken_from_a_dataset(content: str, expected_prompts: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(content)

    assert read_prompts(file) == expected_prompts


def test_what_has_no_end_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_headroom_tools.load.prompts.PROMPTS_LIMIT_BYTES", 1000)

    assert read_prompts(Path("/dev/zero")) == ("\0" * 1000,)


@pytest.mark.parametrize(("content", "why"), [("{}", "has no prompt: needs"), (None, "cannot be read: No such file")])
def test_a_dataset_without_a_prompt_is_refused(content: str | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_text(content)

    with pytest.raises(BadInput, match=f"--prompts {file}: {why}"):
        read_prompts(file)


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (70, 33), (640, 480)])
def test_an_image_is_a_png_of_that_size_that_no_cache_has(size: tuple[int, int]) -> None:
    random = Random(4)  # noqa: S311 - not for secrets
    image, other_image = draw_image(size, random), draw_image(size, random)

    pixels = decode_png(image)
    assert (len(pixels[0]) // 3, len(pixels)) == size
    assert image != other_image
    assert len({row[:3] for row in pixels}) == -(-size[1] // 32)


def decode_png(image: bytes) -> list[bytes]:
    """Return the rows of an RGB image without filters, after its checksums."""
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, width = 8, b"", 0
    while at < len(image):
        length, kind = int.from_bytes(image[at : at + 4]), image[at + 4 : at + 8]
        content = image[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + content) == int.from_bytes(image[at + 8 + length : at + 12 + length])
        width = int.from_bytes(content[:4]) if kind == b"IHDR" else width
        data += content if kind == b"IDAT" else b""
        at += 12 + length
    lines = zlib.decompress(data)
    return [lines[begin + 1 : begin + 1 + 3 * width] for begin in range(0, len(lines), 3 * width + 1)]


def test_an_image_goes_to_the_chat_api_as_vllm_documents_it() -> None:
    body = json.loads(build_request_body(CompletionApi.CHAT, "tiny", "what is it", 9, b"png"))

    text, image = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "what is it"}
    scheme, _, data = image["image_url"]["url"].partition(",")
    assert (image["type"], scheme, base64.b64decode(data)) == ("image_url", "data:image/png;base64", b"png")
