"""A state worth keeping, made once."""

from __future__ import annotations

import pytest

from tests.unit.daemon.state.engine import ALARM_STEPS, after, make_snapshot
from vllm_headroom.daemon.state.saved import DerivationStates


@pytest.fixture(scope="session")
def alarmed() -> DerivationStates:
    """Return the memory of a leaking engine at the step ALARM_STEPS."""
    return after(make_snapshot(step) for step in range(1, ALARM_STEPS + 1))
