"""How much of each room of the program the tests execute, in their own processes: not in those that they start."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import coverage
import pytest

SOURCE: Final = Path(__file__).parents[1] / "src"


class CoverageByRoom:
    """A plugin that measures from now on, and prints the sums; $COVERAGE_FILE says where they are kept."""

    def __init__(self) -> None:
        self._measured = coverage.Coverage(data_suffix=True, source=[str(SOURCE)])
        self._measured.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._measured.stop()
        self._measured.save()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            return
        combined = coverage.Coverage(source=[str(SOURCE)])
        combined.combine()
        executed, statements = Counter[str](), Counter[str]()
        for name in sorted(combined.get_data().measured_files()):
            room = "/".join(Path(name).relative_to(SOURCE).parent.parts[:2])
            _, executable, _, missing, _ = combined.analysis2(name)
            executed[room] += len(executable) - len(missing)
            statements[room] += len(executable)
        terminalreporter.section("coverage by room")
        for room, count in sorted(statements.items()):
            share = executed[room] / max(1, count)
            terminalreporter.write_line(f"{room:32} {executed[room]:6} of {count:6} statements {share:4.0%}")
