from __future__ import annotations

from vllm_headroom_tools.load.stream import Completion, Outcome
from vllm_headroom_tools.load.tally import MOST_TEXTS, OTHER_TEXTS, Tally


def test_a_server_that_always_says_something_new_is_quoted_so_often_only() -> None:
    made = Tally(0.0)
    for number in range(100):
        made.started_requests += 1
        made.add_end(Completion(outcome=Outcome.FAILED, text=f"error {number}"))
    made.started_requests += 1
    made.add_end(Completion(outcome=Outcome.FAILED, text="error 3"))

    assert len(made.texts) == MOST_TEXTS + 1
    assert made.texts[Outcome.FAILED, OTHER_TEXTS] == 100 - MOST_TEXTS
    assert made.texts[Outcome.FAILED, "error 3"] == 2
