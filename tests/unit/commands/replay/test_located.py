"""A trace of a daemon that read the probe: replay says where it leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.command import read_data
from tests.unit.commands.replay.test_replay import HOURS, replay
from tests.unit.commands.replay.traces import MIB, leaking, text

BASE = 70_000 * MIB


def probed(place: str) -> Iterator[dict[str, Any]]:
    for record in leaking(HOURS):
        (gpu,) = record["gpus"]
        grown = gpu["used"] - BASE
        fragmented = 50 * MIB + grown * (place == "fragmentation")
        allocated = BASE - 3_000 * MIB + grown * (place == "tensors")
        inside = {"allocated": allocated, "reserved_by_torch": allocated + 500 * MIB + fragmented}
        yield record | {"gpus": [gpu | inside | {"parts": {"fragmented": fragmented}}]}


@pytest.mark.parametrize(
    ("place", "location_text"),
    [
        ("tensors", "tensors"),
        ("fragmentation", "what torch has reserved and cannot use"),
        ("outside_torch", "what torch knows nothing of"),
    ],
)
def test_where_it_leaks_is_said(place: str, location_text: str) -> None:
    trace = text(probed(place))
    words, figures = replay("-", trace=trace), replay("-", "--json", trace=trace)

    assert f"    in           {location_text}" in words.stdout.splitlines()
    (gpu,) = read_data(figures.stdout)["gpus"]
    assert gpu["first_leaking"]["location"] == gpu["last_leaking"]["location"] == place
