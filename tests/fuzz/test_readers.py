"""Spoiled texts for every reader: those that once ended one, and new ones for as long as `make fuzz` says."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target

SEEDS: Final = Path(__file__).parent / "seeds"
"""A folder for each target, with the texts that once ended it."""

SECONDS: Final = float(os.environ.get("FUZZ_SECONDS", "60"))
LONGEST_CPU_SECONDS: Final = 5.0
"""A text that costs more is a fault too: the costliest page that is accepted takes half a second."""

EXAMPLES_AT_ONCE: Final = 200

PIECES: Final = (
    *(b"", b"\0", b"\n", b"\r", b" ", b"\t", b"-", b"+", b".", b":", b"/", b"..", b"=", b"%n", b"\\", b'"', b"'", b"#"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'{"a":',
        b"[[",
        b",",
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"~",
        b"!!x ",
    ),
    *(b"0", b"-1", b"65536", b"4294967296", b"18446744073709551616", b"1e999", b"-1e308", b"1_0", b"9" * 400, b"0x1f"),
    *(b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
    *(
        "\u0664".encode(),
        "\u0130".encode(),
        "\U0001f600".encode(),
        b"\x1b[2J",
        b"&a",
        b"*a",
        b"<<",
        b"--",
        b"$(x)",
        b"${y}",
    ),
)
"""What readers stumble over: ends of lines that only some know, digits that are no ASCII, numbers that fit nowhere."""


@st.composite
def spoil(draw: st.DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """Return a good text of which parts are replaced, repeated or cut off."""
    content = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(0, 5))):
        begin = draw(st.integers(0, len(content)))
        end = draw(st.integers(begin, min(len(content), begin + 40)))
        piece = draw(st.sampled_from(PIECES) | st.just(content[begin:end]) | st.binary(max_size=6))
        content = content[:begin] + piece * draw(st.sampled_from((1, 1, 1, 2, 30, 3000))) + content[end:]
    return content[: draw(st.sampled_from((2**20, 2**20, 2**20, len(content) // 2)))]


def play(target: Target, content: bytes) -> None:
    """Let a target read a text, which it may refuse as it refuses texts."""
    began_seconds = time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(*target.refusals):
        target.play(content, Path(folder))
    assert time.process_time() - began_seconds < LONGEST_CPU_SECONDS


@pytest.mark.parametrize("name", TARGETS)
def test_no_text_that_once_ended_a_reader_ends_it_again(name: str) -> None:
    for content in (*TARGETS[name].samples, *(file.read_bytes() for file in sorted((SEEDS / name).glob("*")))):
        play(TARGETS[name], content)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
def test_no_spoiled_text_ends_a_reader(name: str) -> None:
    target = TARGETS[name]
    newest = [b""]
    began_seconds = time.monotonic()
    n_examples = 0
    number = time.time_ns()

    while time.monotonic() - began_seconds < SECONDS:
        number += 1

        @seed(number)
        @settings(
            max_examples=EXAMPLES_AT_ONCE,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(spoil(target.samples))
        def read_spoiled(content: bytes) -> None:
            nonlocal n_examples
            n_examples += 1
            newest[0] = content
            play(target, content)

        try:
            read_spoiled()
        except BaseException:
            file = SEEDS / name / hashlib.sha256(newest[0]).hexdigest()[:16]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(newest[0])
            print(f"{name}: kept as {file}")  # noqa: T201 - for whoever runs it
            raise
    print(f"{name}: {n_examples} texts")  # noqa: T201 - for whoever runs it
