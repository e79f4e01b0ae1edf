"""Progress of a test run by folder: one line for each folder of tests once all of it is done."""

from collections import Counter, defaultdict
from typing import Any

import pytest

__all__ = ["FolderProgress"]


class FolderProgress:
    """A pytest plugin that replaces a dot a test by a line a folder, with or without pytest-xdist."""

    def __init__(self, write_line: Any):
        self._write_line = write_line
        self._expected: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this process, which are all where there are no workers."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Count the tests that a worker found; each finds the same ones."""
        self._expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Print no dot for a test that passed or was skipped."""
        if report.failed or (report.passed and report.when != "call"):
            return None
        return report.outcome, "", report.outcome.upper()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test went, and tell of its folder when that was the last one."""
        folder = _folder(report.nodeid)
        self._seconds[folder] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self._outcomes[folder][report.outcome] += 1
        if report.when == "teardown":
            self._finished[folder] += 1
            if self._finished[folder] == self._expected[folder]:
                outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self._outcomes[folder].items()))
                self._write_line(f"{folder:20} {outcomes} in {self._seconds[folder]:.0f} s")

    def _expect(self, ids: list[str]) -> None:
        self._expected = Counter(map(_folder, ids))


def _folder(nodeid: str) -> str:
    return nodeid.partition("::")[0].rpartition("/")[0]
