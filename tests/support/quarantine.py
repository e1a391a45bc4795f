"""Reads tests/quarantine.txt, the tests that may fail for a while, and holds the reasons for which a test may be skipped.

A line is `TEST DATE REASON`: the test's id, the day on which it was put there, and why. Such a test runs and is reported; its failure does
not fail `make test`. After MAX_DAYS the line has no effect any more, and the test fails a run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "quarantine.txt"
MAX_LINES, MAX_DAYS = 10, 14

ALLOWED_SKIPS = (
    "No ClickHouse server is installed",
    "Prometheus is not installed",
    "docker-registry is not installed",
    "systemd is not installed",
    "files of another user are root's to make",
    "only root can make a folder of somebody else's",
    "no cache is wider than what is computed with",
    "this CPU has no other way",
    "this torch has no oneDNN",
    "a CPU without a row in the table",
    "one CPU:",
    "compiles for older x86-64 CPUs",
)
"""How the reasons of skips begin that `--strict-skips` lets pass: what only root can install or do, parameters that mean nothing here, and
what this machine's CPU has not."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    test: str
    since: date
    reason: str


def read_quarantine(path: Path = FILE) -> list[Quarantined]:
    """The lines that are neither empty nor comments. Raises ValueError for one of another form."""
    found = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        test, since, reason = line.split(maxsplit=2)
        found.append(Quarantined(test, date.fromisoformat(since), reason))
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="fail where a test is skipped for a reason that is not allowed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    today = datetime.now(UTC).date()
    reasons = {one.test: one.reason for one in read_quarantine() if 0 <= (today - one.since).days <= MAX_DAYS}
    for item in items:
        if (reason := reasons.get(item.nodeid)) is not None:
            item.add_marker(pytest.mark.xfail(reason=f"in quarantine: {reason}", strict=False))


class _Skips:
    """Of the process that reports: where tests run in several, the one that started them."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
                self.refused.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.refused:
            terminalreporter.write_line(f"a skip that is not allowed: {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-skips"):
        config.pluginmanager.register(_Skips())
