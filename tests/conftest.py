"""The golden option: `pytest --update-golden` writes what is expected, to be read in the diff."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests import namespace

Golden = Callable[[Path, str], None]

# How long an example takes says nothing on a busy machine. In CI, which it knows by the environment, Hypothesis loads
# its own profile "ci", whose examples are the same in every run; `make check` asks for it by name.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() != "ci":
    settings.load_profile("local")

# The program is compiled once, not in each of the many processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Prometheus and promtool collect garbage less often: a quarter less CPU for 120 MB.
os.environ.setdefault("GOGC", "400")

if MEASURES := "COVERAGE_FILE" in os.environ:  # before the conftest of a folder imports the program
    from tests.coverage_by_room import CoverageByRoom

    COVERAGE = CoverageByRoom()

END_TO_END: Final = Path(__file__).parent / "e2e"
WHY_NOT_ALONE = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the end-to-end tests, and what runs with them, where no process shows but theirs."""
    places = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    chosen = any(END_TO_END.is_relative_to(place) or place.is_relative_to(END_TO_END) for place in places)
    if chosen and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.stash[WHY_NOT_ALONE] = namespace.enter()


def pytest_configure(config: pytest.Config) -> None:
    if MEASURES:
        config.pluginmanager.register(COVERAGE)


def pytest_report_header(config: pytest.Config) -> str | None:
    why = config.stash.get(WHY_NOT_ALONE, "")
    return f"other processes of this machine show, such as a vLLM's, and may fail e2e tests: {why}" if why else None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes after their argument: pytest shows their content, which for gzip's holds the time."""
    return argname if isinstance(val, bytes) else None


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect no garbage among the thousands of tests, which stay: it was a third of the collection's CPU."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of end-to-end tests, which mostly wait, over the first four fifths of those that compute."""
    places = dict[Path, float]()
    for share, waits in ((0.8, True), (1.0, False)):
        paths = list(dict.fromkeys(item.path for item in items if item.path.is_relative_to(END_TO_END) is waits))
        places |= {path: share * number / len(paths) for number, path in enumerate(paths)}
    items.sort(key=lambda item: places[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected files instead of comparing")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo what a command reports about logging, of which a process has one, for the tests that come after."""
    loggers = [logging.getLogger(name) for name in ("", "vllm_headroom")]
    states_before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in states_before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


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
