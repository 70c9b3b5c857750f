from __future__ import annotations

from vllm_headroom_tools.load.stream import MOST_TEXTS, OTHERS, Completion, Outcome, Tally


def test_a_server_that_always_says_something_new_is_quoted_so_often_only() -> None:
    made = Tally(0.0)
    for number in range(100):
        made.began += 1
        made.end(Completion(outcome=Outcome.FAILED, text=f"error {number}"))
    made.began += 1
    made.end(Completion(outcome=Outcome.FAILED, text="error 3"))

    assert len(made.texts) == MOST_TEXTS + 1
    assert made.texts[Outcome.FAILED, OTHERS] == 100 - MOST_TEXTS
    assert made.texts[Outcome.FAILED, "error 3"] == 2
