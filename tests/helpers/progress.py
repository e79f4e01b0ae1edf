"""Progress of a test run: a line for each failure, one now and then, and for each folder once all of it is done."""

import time
from collections import Counter, defaultdict
from typing import Any

import pytest

__all__ = ["FolderProgress"]

REPORT_SECONDS = 30.0  # between lines that say how far the tests are


class FolderProgress:
    """A pytest plugin that replaces a letter a test by lines, with or without pytest-xdist."""

    def __init__(self, write_line: Any):
        self._write_line = write_line
        self._expected: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: Counter[str] = Counter()
        self._told = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this process, which are all where there are no workers."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Count the tests that a worker found; each finds the same ones."""
        self._expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Print no letter for a test; those that fail have lines of their own."""
        if report.passed and report.when != "call":
            return None
        category = "error" if report.failed and report.when != "call" else report.outcome
        return category, "", category.upper()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tell of a test that failed, of a folder whose last test it was, and now and then how far all are."""
        folder = _folder(report.nodeid)
        self._seconds[folder] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self._outcomes[folder][report.outcome] += 1
        if report.failed:
            self._write_line(f"FAILED {report.nodeid}" + f" ({report.when})" * (report.when != "call"))
        if report.when == "teardown":
            self._finished[folder] += 1
            if self._finished[folder] == self._expected[folder]:
                outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self._outcomes[folder].items()))
                self._write_line(f"{folder:20} {outcomes} in {self._seconds[folder]:.0f} s")
            if time.monotonic() - self._told > REPORT_SECONDS:
                self._told = time.monotonic()
                self._write_line(f"{self._finished.total()} of {self._expected.total()} tests, now {report.nodeid}")

    def _expect(self, ids: list[str]) -> None:
        self._expected = Counter(map(_folder, ids))


def _folder(nodeid: str) -> str:
    return nodeid.partition("::")[0].rpartition("/")[0]
