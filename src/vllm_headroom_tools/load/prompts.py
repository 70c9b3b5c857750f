"""The prompts of a load and the bodies of its requests."""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, Final

from vllm_headroom.text_file import read_file
from vllm_headroom_tools.bad_input import BadInput

PROMPTS_LIMIT_BYTES: Final = 2**30
"""The maximum number of bytes to read from a dataset. ShareGPT has 0.6 GiB. Without a maximum,
reading a device such as /dev/zero would never end.
"""


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the prompts in a dataset.

    The file may be ShareGPT's JSON, JSON lines, or lines of text. Raises BadInput if the file
    cannot be read or does not contain any prompts.
    """
    try:
        content = read_file(file, PROMPTS_LIMIT_BYTES)
        # ShareGPT is a single JSON document; JSON lines fail here and are read below.
        entries = json.loads(content)
    except OSError as error:
        raise BadInput(f"--prompts {file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        # the file as a whole is not JSON, so each line is an entry
        entries = [_parse_line(line) for line in content.decode(errors="replace").splitlines()]
    prompts: tuple[str, ...] = ()
    if isinstance(entries, list):
        prompts = tuple(filter(None, map(find_prompt, entries)))
    if not prompts:
        needed = "needs ShareGPT's `conversations`, `prompt`, or lines of text"
        raise BadInput(f"--prompts {file}: has no prompt: {needed}")
    return prompts


def _parse_line(line: str) -> object:
    """Parse a line as JSON; return the line itself if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return line.strip()


def find_prompt(entry: object) -> str:
    """Return the prompt in a dataset entry, or an empty string without one.

    An entry is a string, or an object with a prompt or a conversation.
    """
    text = entry
    if isinstance(entry, dict):
        text = _find_first_message(entry)
        if isinstance(text, dict):
            text = text.get("value", text.get("content"))
    return text if isinstance(text, str) else ""


def _find_first_message(entry: dict[str, Any]) -> object:
    """Return an entry's prompt, or the first message of its conversation.

    The result is a string or an object. Returns an empty string if the entry has no prompt and no
    conversation.
    """
    for key in ("prompt", "conversations", "messages"):
        if key not in entry:
            continue
        messages = entry[key]
        if isinstance(messages, list) and messages:
            return messages[0]
        return messages
    return ""


_TEXT: Final = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by hot but some what there we can out other were all your when up use word how said an "
    "each she which do their time if will way about many then them would write like so these her "
    "long make thing see him two has look more day could go come did my sound no most number who "
    "over know water than call first people may down side been now find"
)
WORDS: Final = tuple(_TEXT.split())
"""Words that are so common that most tokenizers need one token for each. The token includes the
word's leading space. In all of Mistral's tokenizers, 1,000 of these words are 1,000 tokens
(measured). The tokenizers are SentencePiece and Tekken.
"""

RING_WORDS: Final = 8192
"""Our choice: the number of words that are drawn once. Each prompt is a slice of them. Drawing
every word of a long prompt would take too long.
"""

FRESH_WORDS: Final = 5
"""The number of words that are drawn separately for each prompt. Five words give 10**10 possible
beginnings, so prompts do not hit a prefix cache.
"""


def build_prompt_maker(shared_ratio: float, random: Random) -> Callable[[int], str]:
    """Return a function that builds a prompt of a given number of words.

    A word is about one token. The first `shared_ratio` of each prompt is the same in all prompts.
    The remainder of each prompt begins with words that are new in that prompt.
    """
    shared_ring = random.choices(WORDS, k=RING_WORDS)
    own_ring = random.choices(WORDS, k=RING_WORDS)

    def make_prompt(word_count: int) -> str:
        """Return a prompt of this many words.

        The prompt begins with the words that all prompts share.
        """
        # The share refers to words, because a word is about one token.
        shared_count = round(shared_ratio * word_count)
        rings = word_count // RING_WORDS + 1
        shared_words = (shared_ring * rings)[:shared_count]
        # Without fresh words, a prompt could begin like an earlier prompt and hit a prefix cache.
        fresh_words = random.choices(WORDS, k=min(word_count - shared_count, FRESH_WORDS))
        own_count = word_count - shared_count - len(fresh_words)
        start = random.randrange(RING_WORDS)
        # the ring is repeated once more, because the start may be near its end
        own_words = (own_ring * (rings + 1))[start : start + own_count]
        return " ".join((*shared_words, *fresh_words, *own_words))

    return make_prompt


BLOCK_PIXELS: Final = 32
"""Our choice: the side length of a single-colour square."""


def draw_image(size: tuple[int, int], random: Random) -> bytes:
    """Return a PNG of randomly coloured squares.

    The image is new to all of the server's caches. `size` is the width and height in pixels.
    """
    width, height = size
    pixels = b""
    for top in range(0, height, BLOCK_PIXELS):
        squares = [random.randbytes(3) * BLOCK_PIXELS for _ in range(0, width, BLOCK_PIXELS)]
        row = b"".join(squares)[: 3 * width]
        # each line begins with its filter type: 0 means none
        pixels += (b"\0" + row) * min(BLOCK_PIXELS, height - top)
    # The image is 8-bit RGB and not interlaced (PNG specification, 11.2.1).
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = (
        _build_chunk(b"IHDR", header),
        _build_chunk(b"IDAT", zlib.compress(pixels, 1)),
        _build_chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _build_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a PNG chunk: its length, type, data and checksum."""
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum


class CompletionApi(StrEnum):
    """The API used to request tokens."""

    COMPLETIONS = "completions"
    CHAT = "chat"


PATHS: Final = {
    CompletionApi.COMPLETIONS: "/v1/completions",
    CompletionApi.CHAT: "/v1/chat/completions",
}


def build_request_body(
    api: CompletionApi, model: str, prompt: str, output_tokens: int, image: bytes | None = None
) -> bytes:
    """Return the JSON body of a streaming request for exactly `output_tokens` tokens.

    `ignore_eos` is specific to vLLM. Without this field, the model would decide where its answer
    ends. `include_usage` makes the server report its own token counts. An image, which must be a
    PNG, requires the chat API.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if api is CompletionApi.COMPLETIONS:
        body["prompt"] = prompt
    else:
        content = _build_content(prompt, image)
        body["messages"] = [{"role": "user", "content": content}]
    return json.dumps(body, separators=(",", ":")).encode()


def _build_content(prompt: str, image: bytes | None) -> str | Sequence[object]:
    """Return the content of a chat message.

    The content is the prompt or, with an image, a list of parts.
    """
    if image is None:
        return prompt
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return [
        {"type": "text", "text": prompt},
        {"type": "image_url", "image_url": {"url": url}},
    ]
