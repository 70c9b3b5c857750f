from __future__ import annotations

from vllm_headroom_tools.load.stream import Completion, Outcome
from vllm_headroom_tools.load.tally import MOST_TEXTS, OTHER_TEXTS, Tally


def test_a_server_that_always_says_something_new_is_quoted_so_often_only() -> None:
    tally = Tally(0.0)
    for number in range(100):
        tally.started_requests += 1
        tally.add_end(Completion(outcome=Outcome.FAILED, text=f"error {number}"))
    tally.started_requests += 1
    tally.add_end(Completion(outcome=Outcome.FAILED, text="error 3"))

    assert len(tally.texts) == MOST_TEXTS + 1
    assert tally.texts[Outcome.FAILED, OTHER_TEXTS] == 100 - MOST_TEXTS
    assert tally.texts[Outcome.FAILED, "error 3"] == 2
