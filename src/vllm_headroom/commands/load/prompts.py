"""What the server is asked: prompts and answers of about so many tokens."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from random import Random
from typing import Any, Final

from msgspec import Struct

LENGTHS: Final = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?", re.ASCII)


class Lengths(Struct, frozen=True, kw_only=True):
    """Whole numbers of tokens from `least` to `most`, each doubling as likely as the next: many short, few long."""

    least: int
    most: int

    def drawn(self, chance: float) -> int:
        """Return the length at `chance`, a number from 0 to below 1."""
        return min(self.most, int(self.least * ((self.most + 1) / self.least) ** chance))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def lengths(text: str) -> Lengths:
    """Return the distribution of a text such as `512` or `256..2048`."""
    found = LENGTHS.fullmatch(text.strip())
    if found is None:
        raise ValueError
    least = int(found[1])
    most = int(found[2] or least)
    if not 1 <= least <= most:
        raise ValueError
    return Lengths(least=least, most=most)


_TEXT: Final = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but"
    " some what there we can out other were all your when up use word how said an each she which do their time if will"
    " way about many then them would write like so these her long make thing see him two has look more day could go"
    " come did my sound no most number who over know water than call first people may down side been now find"
)
WORDS: Final = tuple(_TEXT.split())
"""Common enough that vocabularies have each, with the space before it, as one token: 1,000 of them are 1,000 tokens in
all of Mistral's, SentencePiece and Tekken (measured)."""

DIFFERENT_WORDS: Final = 5
"""Of the words that are a prompt's own, those that are drawn one by one: 10**10 beginnings, so none is in a cache."""

RING_WORDS: Final = 8192


class Api(StrEnum):
    """How a completion is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Prompts:
    """Makes prompts whose first `shared_ratio` is the same in all, and whose rest is in none before."""

    def __init__(self, *, shared_ratio: float, random: Random) -> None:
        self._shared_ratio = shared_ratio
        self._random = random
        self._common = random.choices(WORDS, k=RING_WORDS)
        self._ring = random.choices(WORDS, k=RING_WORDS)

    def of(self, words: int) -> str:
        """Return a prompt of so many words, each of which is about a token."""
        shared = round(self._shared_ratio * words)
        own = words - shared
        first = self._random.choices(WORDS, k=min(own, DIFFERENT_WORDS))
        begin = self._random.randrange(RING_WORDS)
        return " ".join((*_cut(self._common, 0, shared), *first, *_cut(self._ring, begin, own - len(first))))


def _cut(ring: list[str], begin: int, count: int) -> list[str]:
    found = ring[begin : begin + count]
    while len(found) < count:
        found += ring[: count - len(found)]
    return found


def request_body(api: Api, model: str, prompt: str, output_tokens: int) -> bytes:
    """Return the body that asks for exactly so many tokens, streamed, with the server's own count of them at the end.

    `ignore_eos` is vLLM's: without it a model ends its answer when it likes.
    """
    asked: dict[str, Any] = (
        {"prompt": prompt} if api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    )
    how = {
        "model": model,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(how | asked, separators=(",", ":")).encode()
