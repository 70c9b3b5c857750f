"""Each witness of the detector earns its place: the day that its row names is judged wrongly without it."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
from rent import OFF

from vllm_headroom.derive.leak.witnesses import WITNESSES, Witness


def play(test: str) -> None:
    """Run a test by its id, a parametrized one with its first case, or with that of the id's name."""
    path, _, name = test.partition("::")
    function_name, _, case = name.rstrip("]").partition("[")
    function = getattr(import_module(path.removesuffix(".py").replace("/", ".")), function_name)
    arguments: dict[str, Any] = {}
    for mark in getattr(function, "pytestmark", ()):
        names, values = mark.args
        names = names.split(",") if isinstance(names, str) else names
        chosen = next((value for value in values if case and value.id == case), values[0])
        chosen = getattr(chosen, "values", chosen)
        arguments |= dict(zip(names, chosen if len(names) > 1 else (chosen,), strict=True))
    function(**arguments)


@pytest.mark.parametrize("witness", WITNESSES, ids=[witness.name for witness in WITNESSES])
def test_the_day_of_a_witness_is_judged_wrongly_without_it(witness: Witness) -> None:
    play(witness.fails_without)
    with patch.object(*OFF[witness.name]), pytest.raises(AssertionError):
        play(witness.fails_without)


def test_the_benchmark_turns_each_witness_off() -> None:
    assert set(OFF) - {"nothing"} == {witness.name for witness in WITNESSES}
