"""By which page a tick looks for the engine's processes."""

from __future__ import annotations

from tests.unit.daemon.test_sampler import Said, parsed, sampler, ticked


def test_processes_are_looked_for_by_the_first_page_and_then_by_the_last_one() -> None:
    log_lines = Said()
    subject = sampler(log_lines)
    for log_lines.engine in ("1", "2", "3"):
        ticked(subject)

    assert log_lines.asked == [parsed("1"), parsed("1"), parsed("2")]
