from dataclasses import replace

import pytest

from vllm_headroom.derive.leak.facts import Track, Verdict
from vllm_headroom.model.changed import changed


def test_it_gives_what_replace_gives_and_leaves_what_it_was_given() -> None:
    before = Track(clock=1.0, rises=(2.0,), verdict=Verdict.GROWING)

    after = changed(before, clock=3.0, verdict=Verdict.LEAKING)

    assert after == replace(before, clock=3.0, verdict=Verdict.LEAKING)
    assert before == Track(clock=1.0, rises=(2.0,), verdict=Verdict.GROWING)


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(AttributeError, match="clok"):
        changed(Track(clock=1.0), clok=3.0)  # type: ignore[call-arg]
