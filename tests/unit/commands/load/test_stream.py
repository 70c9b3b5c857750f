from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.streaming_server import ENGINE_DEAD, OUT_OF_MEMORY
from tests.unit.commands.load.asking import usage
from vllm_headroom_tools.load.stream import (
    LONGEST_EVENT_BYTES,
    LONGEST_TEXT,
    Completion,
    Outcome,
    Stream,
    StreamError,
    parse_refusal,
)

TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def fed(*pieces: bytes) -> tuple[Stream, list[float]]:
    """Return a stream that got a piece each second from 10 on, and its gaps."""
    gaps: list[float] = []
    stream = Stream(gaps.append)
    for second, piece in enumerate(pieces):
        stream.feed(piece, 10.0 + second)
    return stream, gaps


def test_times_are_of_events_with_a_choice() -> None:
    stream, gaps = fed(b'data: {"choices":[]}\n\n', TOKEN, TOKEN + TOKEN, b": ping\n\n", TOKEN, usage(), DONE)

    assert stream.first_token_seconds == 11.0
    assert gaps == [1.0, 0.0, 2.0]


def test_the_servers_counts_are_kept() -> None:
    stream, _ = fed(TOKEN, usage(prompt_tokens=7, completion_tokens=3), DONE)

    assert stream.build_completion() == Completion(outcome=Outcome.SUCCEEDED, prompt_tokens=7, generation_tokens=3)


@pytest.mark.parametrize("counts", [b"", usage(), b'data: {"choices":[],"usage":null}\n\n'])
def test_counts_that_the_server_does_not_give_are_unknown(counts: bytes) -> None:
    assert fed(TOKEN, counts, DONE)[0].build_completion() == Completion(outcome=Outcome.SUCCEEDED)


@given(st.lists(st.integers(1, 200), max_size=8))
def test_it_does_not_matter_where_a_stream_is_cut(cuts: list[int]) -> None:
    stream_bytes = (TOKEN + TOKEN.replace(b"\n", b"\r\n") + usage(prompt_tokens=7, completion_tokens=2) + DONE).replace(
        b"data: {", b"data:{", 1
    )
    pieces, begin = [], 0
    for cut in cuts:
        pieces.append(stream_bytes[begin : begin + cut])
        begin += cut
    stream, gaps = fed(*pieces, stream_bytes[begin:])

    assert stream.build_completion().generation_tokens == 2
    assert len(gaps) == 1


def test_a_stream_without_its_end_has_failed() -> None:
    assert fed(TOKEN)[0].build_completion() == Completion(outcome=Outcome.FAILED, text="no [DONE] at the end")
    assert fed(b'{"choices": []}')[0].build_completion().text == "it answered 200 with no stream of events"


@pytest.mark.parametrize(
    ("event", "outcome", "text", "dead"),
    [
        ({"error": {"message": OUT_OF_MEMORY, "code": 500}}, Outcome.OUT_OF_MEMORY, OUT_OF_MEMORY, False),
        ({"error": {"message": ENGINE_DEAD}}, Outcome.FAILED, ENGINE_DEAD, True),
        ({"error": "broken"}, Outcome.FAILED, "broken", False),
        ({"object": "error", "message": "old"}, Outcome.FAILED, "old", False),
        (
            {"choices": [{"finish_reason": "abort"}]},
            Outcome.FAILED,
            "the engine ended it with finish_reason abort",
            False,
        ),
    ],
)
def test_an_error_in_a_stream_is_no_success(event: object, outcome: Outcome, text: str, *, dead: bool) -> None:
    stream, _ = fed(TOKEN, b"data: " + json.dumps(event).encode() + b"\n\n", DONE)

    assert stream.build_completion() == Completion(outcome=outcome, text=text, is_engine_dead=dead)


@pytest.mark.parametrize("event", [b"{", b"[]", b"1", b"[" * 100_000, b"\xff"])
def test_an_event_that_is_no_object_is_reported(event: bytes) -> None:
    with pytest.raises(StreamError, match="an event of its stream is no JSON"):
        fed(b"data: " + event + b"\n\n")


@pytest.mark.parametrize("choices", ["x", [1], [None], [{}], {"a": 1}])
def test_choices_of_another_shape_count_as_events(choices: object) -> None:
    stream, _ = fed(b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n", DONE)

    assert stream.build_completion().outcome is Outcome.SUCCEEDED


def test_a_line_without_an_end_is_not_held() -> None:
    with pytest.raises(StreamError, match="longer than"):
        fed(b"data: " + b"x" * LONGEST_EVENT_BYTES)


@pytest.mark.parametrize(
    ("status", "body", "outcome", "text"),
    [
        (500, {"error": {"message": OUT_OF_MEMORY}}, Outcome.OUT_OF_MEMORY, OUT_OF_MEMORY),
        (500, {"detail": "torch.OutOfMemoryError"}, Outcome.OUT_OF_MEMORY, '{"detail": "torch.OutOfMemoryError"}'),
        (503, {"error": {"message": "HIP out of memory"}}, Outcome.OUT_OF_MEMORY, "HIP out of memory"),
        (500, {"error": {"message": ENGINE_DEAD}}, Outcome.FAILED, ENGINE_DEAD),
        (503, {"error": {"message": "full"}}, Outcome.REJECTED, "full"),
        (429, "slow", Outcome.REJECTED, '"slow"'),
        (404, {"message": "x", "object": "error"}, Outcome.FAILED, "x"),
    ],
)
def test_what_a_refusal_means(status: int, body: object, outcome: Outcome, text: str) -> None:
    answer = parse_refusal(status, json.dumps(body).encode())

    assert answer == Completion(outcome=outcome, text=f"{status}: {text}", is_engine_dead=text == ENGINE_DEAD)


def test_a_refusal_without_words_is_its_status() -> None:
    assert parse_refusal(502, b"") == Completion(outcome=Outcome.FAILED, text="502")


def test_words_are_shown_in_a_short_line_without_what_moves_a_terminal() -> None:
    text = parse_refusal(500, b"<html>\n<b>\x1b[2J" + 1000 * b"x" + b"CUDA out of memory").text

    assert text.startswith("500: <html> <b>\\x1b[2Jxx")
    assert len(text) == LONGEST_TEXT + len("...")
    assert parse_refusal(500, 1000 * b"x" + b"CUDA out of memory").outcome is Outcome.OUT_OF_MEMORY
