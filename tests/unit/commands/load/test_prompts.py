from __future__ import annotations

import json
from random import Random

import pytest

from vllm_headroom_tools.load.target import RING_WORDS, WORDS, CompletionApi, Prompts, build_request_body


def prompts(shared_ratio: float = 0.0) -> Prompts:
    return Prompts(shared_ratio=shared_ratio, random=Random(4))  # noqa: S311 - not for secrets


@pytest.mark.parametrize("shared_ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("words", [1, 3, 5, 6, 512, RING_WORDS - 1, 3 * RING_WORDS])
def test_a_prompt_has_so_many_words(words: int, shared_ratio: float) -> None:
    prompt = prompts(shared_ratio).make(words).split()

    assert len(prompt) == words
    assert set(prompt) <= set(WORDS)


def test_the_share_is_the_beginning_of_every_prompt_and_the_rest_of_none() -> None:
    made = prompts(0.25)
    all_words = [made.make(400).split() for _ in range(1000)]

    assert len({tuple(words[:100]) for words in all_words}) == 1
    assert len({tuple(words[100:105]) for words in all_words}) == 1000
    assert made.make(200).split()[:50] == all_words[0][:50]


def test_without_a_share_no_prompt_begins_as_another() -> None:
    made = prompts()

    assert len({made.make(16)[:20] for _ in range(1000)}) > 990


def test_what_is_shared_whole_is_the_same_prompt() -> None:
    made = prompts(1.0)

    assert made.make(64) == made.make(64)


@pytest.mark.parametrize(
    ("api", "asked"),
    [
        (CompletionApi.COMPLETIONS, {"prompt": "one two"}),
        (CompletionApi.CHAT, {"messages": [{"role": "user", "content": "one two"}]}),
    ],
)
def test_the_body_asks_for_a_stream_of_so_many_tokens_with_the_servers_count(
    api: CompletionApi, asked: dict[str, object]
) -> None:
    assert json.loads(build_request_body(api, "tiny", "one two", 9)) == asked | {
        "model": "tiny",
        "max_tokens": 9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
