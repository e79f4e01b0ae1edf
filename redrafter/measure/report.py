"""The report of a measurement: tables on stdout, progress on stderr, one JSON document at the end."""

import json
import math
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from redrafter.errors import ReDrafterError, first_line
from redrafter.files.atomic_file import check_writable, write_atomically

__all__ = ["Report", "Table", "format_table", "plain_data"]


MIN_WIDTH = 5  # of a column of `format_table`: that of a share with three decimals


class Report:
    """A report that is printed as it grows and saved after every addition.

    Attributes:
        document: What the JSON document will hold; `errors` lists the sections that failed, and `complete` is true once
            the run has ended.
        path: A file that is replaced by the document at each addition, so that a run that is cut short leaves what it
            has measured; None for no file.
        note: A sentence printed with every table, or None.
    """

    def __init__(
        self, facts: dict[str, Any], *, path: Path | None = None, flag: str = "--json", note: str | None = None
    ):
        """Begin a report.

        Args:
            facts: The conditions of the measurement, with which the document begins.
            path: The file for the document.
            flag: The option that named the file, for messages.
            note: A sentence for every table.

        Raises:
            ArgumentError: The file cannot be written.
        """
        self.document: dict[str, Any] = facts | {"complete": False, "errors": []}
        self.path, self.note = path, note
        self._start = time.perf_counter()
        if path is not None:
            check_writable(path, flag)

    def progress(self, text: str) -> None:
        """Print a line on stderr, behind the seconds since the report began."""
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def line(self, text: str = "") -> None:
        """Print a line on stdout."""
        print(text, flush=True)

    def table(self, title: str, columns: Sequence[tuple[str, int]]) -> "Table":
        """Return a new table with `(name, width)` of each column; nothing is printed before its first row."""
        return Table(self, title, columns)

    def add(self, name: str, item: Any) -> None:
        """Append `item` to the list `name` of the document, and save."""
        self.document.setdefault(name, []).append(plain_data(item))
        self.save()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run the body; an exception in it is added to the document's `errors` and printed, and the run goes on."""
        self.progress(name)
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            self.line(f"{name} failed: {message}")
            if not isinstance(error, ReDrafterError):
                traceback.print_exc()
            self.add_error(name, message)

    def add_error(self, section: str, message: str) -> None:
        """Add an error of a section to the document's `errors`, and save; the exit code will be 1."""
        self.add("errors", {"section": section, "error": message})

    def save(self) -> None:
        """Replace the file by the document as it is; a reader finds the old document or the new one, never a half."""
        if self.path is not None:
            write_atomically(self.path, self._json() + "\n")

    def finish(self) -> int:
        """Print the document as the last line of stdout, and return the exit code: 1 when a section failed."""
        self.document["complete"] = True
        self.save()
        print(self._json(), flush=True)
        return 1 if self.document["errors"] else 0

    def _json(self) -> str:
        return json.dumps(plain_data(self.document), allow_nan=False)


class Table:
    """A table that is printed row by row, its title and column names before the first row."""

    def __init__(self, report: Report, title: str, columns: Sequence[tuple[str, int]]):
        self._report, self._title, self._columns = report, title, columns
        self._begun = False

    def row(self, *values: Any) -> None:
        """Print a row, one value a column; all but the first are aligned right."""
        names, widths = zip(*self._columns, strict=True)
        if not self._begun:
            self._begun = True
            note = [] if self._report.note is None else [self._report.note]
            for line in (f"\n{self._title}", *note, _line(names, widths)):
                self._report.line(line)
        self._report.line(_line([_cell(value) for value in values], widths))


def format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, indent: str = "  ") -> Iterator[str]:
    """Format a table whose rows are all known, each column as wide as its widest cell.

    Args:
        columns: Names of the columns; all but the first are aligned right.
        rows: Values of each row, one a column.
        indent: What begins each line.

    Yields:
        The names of the columns as a line, then a line for each row.
    """
    lines = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(MIN_WIDTH, *map(len, column)) for column in zip(*lines, strict=True)]
    yield from (indent + _line(cells, widths, gap="  ") for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], gap: str = " ") -> str:
    first, *rest = (
        f"{cell:{'>' if at else '<'}{width}}" for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return gap.join([first, *rest]).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def plain_data(value: Any) -> Any:
    """Return `value` as JSON can hold it: dataclasses as objects, infinity and NaN as null, other objects as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
