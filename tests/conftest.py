"""The golden option: `pytest --update-golden` writes what is expected, to be read in the diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

Golden = Callable[[Path, str], None]

# How long an example takes says nothing on a busy machine. In CI, which it knows by the environment, Hypothesis loads
# its own profile "ci", whose examples are the same in every run; `make check` asks for it by name.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() != "ci":
    settings.load_profile("local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a check that a text is what the file says."""
    update = request.config.getoption("--update-golden")

    def check(path: Path, text: str) -> None:
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return check
