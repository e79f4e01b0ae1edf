"""What a benchmark says: tables on stdout as they are done, progress on stderr, one JSON document at last."""

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from redrafter.errors import ReDrafterError, first_line
from redrafter.files.atomic_file import check_writable, write_atomically

__all__ = ["Report", "Table", "plain_data"]


class Report:
    """document: what the JSON will hold; `errors` lists the sections that failed. path: a file that holds the document
    as far as it has come, whenever the run is cut short, and what it held before until there is something to say; flag:
    what named it. note: a sentence for every table."""

    def __init__(
        self, facts: dict[str, Any], *, path: Path | None = None, flag: str = "--json", note: str | None = None
    ):
        self.document: dict[str, Any] = facts | {"complete": False, "errors": []}
        self.path, self.note = path, note
        self._start = time.perf_counter()
        if path is not None:
            check_writable(path, flag)

    def progress(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def table(self, title: str, columns: Sequence[tuple[str, int]]) -> "Table":
        return Table(self, title, columns)

    def add(self, name: str, found: Any) -> None:
        """Append to a list of the document."""
        self.document.setdefault(name, []).append(plain_data(found))
        self.save()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A failure in here is written down, and costs nothing else."""
        self.progress(name)
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            self.document["errors"].append({"section": name, "error": message})
            self.line(f"{name} failed: {message}")
            if not isinstance(error, ReDrafterError):
                traceback.print_exc()
            self.save()

    def save(self) -> None:
        """To the file; a reader finds the old document or the new one, never a half."""
        if self.path is not None:
            write_atomically(self.path, self._json() + "\n")

    def finish(self) -> int:
        """Print the document. Returns an exit code: 1 when a section failed."""
        self.document["complete"] = True
        self.save()
        print(self._json(), flush=True)
        return 1 if self.document["errors"] else 0

    def _json(self) -> str:
        return json.dumps(plain_data(self.document), allow_nan=False)


class Table:
    """Printed row by row; its head, before the first."""

    def __init__(self, report: Report, title: str, columns: Sequence[tuple[str, int]]):
        self._report, self._title, self._columns = report, title, columns
        self._begun = False

    def row(self, *values: Any) -> None:
        """Right-aligned, but for the first column."""
        if not self._begun:
            self._begun = True
            self._report.line(f"\n{self._title}")
            if self._report.note is not None:
                self._report.line(self._report.note)
            self._print([name for name, _ in self._columns])
        self._print([_shown(value) for value in values])

    def _print(self, cells: Sequence[str]) -> None:
        widths = [width for _, width in self._columns]
        first, *rest = zip(cells, widths, strict=True)
        line = f"{first[0]:<{first[1]}}" + "".join(f" {cell:>{width}}" for cell, width in rest)
        self._report.line(line.rstrip())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def plain_data(value: Any) -> Any:
    """As JSON can hold it: dataclasses as objects, numbers that are none as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
