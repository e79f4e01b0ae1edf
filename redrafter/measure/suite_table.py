"""Format measurements on a suite of questions as tables with a row per category: printed, Markdown and CSV.

Publications define accepted length in two ways, so both are reported: over all steps with drafts, and as the mean over
turns.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_atomically
from redrafter.measure.report import cell_text, format_table
from redrafter.scheduler.sequence import Stats

SHOWN_POSITIONS = 8  # draft positions in printed and Markdown tables; CSV includes all
# Column titles by row key, in column order; a table includes the columns that any of its rows has.
COLUMNS = {
    "turns": "turns",
    "skipped": "skipped",
    "failed": "failed",
    "tokens": "tokens",
    "plain_tokens_per_second": "plain tok/s",
    "tokens_per_second": "tok/s",
    "speedup": "x plain",
    "differing_texts": "differ",
    "accepted_length": "accepted, pooled",
    "accepted_length_of_turns": "of turns",
}
LEGEND = (
    "accepted, pooled: 1 + accepted drafts / steps that had drafts; of turns: the mean over turns; "
    "1, 2, ...: share of the steps whose drafts were accepted up to there that accepted one more"
)
AVERAGED = ("accepted_length", "accepted_length_of_turns", "acceptance")


def describe_acceptance(total: Stats, turns: Sequence[Stats]) -> dict[str, Any]:
    """Return a row's entries about accepted drafts in some turns; `total` is the sum of their statistics."""
    return {
        "turns": len(turns),
        "steps": total.draft_steps,  # that had drafts
        "drafts": total.drafted,
        "accepted": total.accepted,
        "accepted_length": total.accepted_length,
        "accepted_length_of_turns": mean([turn.accepted_length for turn in turns]),
        "acceptance": total.acceptance,  # by position
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def mean_of(entries: Sequence[Mapping[str, Any]], names: Sequence[str] = AVERAGED) -> dict[str, Any]:
    """Return means over entries by name: of numbers, or elementwise of lists of any length."""
    means: dict[str, Any] = {}
    for name in names:
        values = [entry[name] for entry in entries]
        # An entry without drafts has None instead of a list.
        lists = any(isinstance(value, list) for value in values)
        means[name] = [mean(each) for each in zip_longest(*values)] if lists else mean(values)
    return means


@dataclass(frozen=True)
class SuiteTable:
    """The rows that were measured on a suite under the same conditions."""

    title: str
    conditions: Mapping[str, Any]  # that CSV has columns for
    rows: Mapping[str, Mapping[str, Any]]  # by category, and one or two of all; the keys include `COLUMNS`

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table as it is printed, its title first."""
        yield from ("", self.title)
        yield from format_table(*self._columns_and_cells())

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown, its title first."""
        columns, cells = self._columns_and_cells()
        yield from ("", f"**{self.title}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
        for row in cells:
            yield "| " + " | ".join(cell_text(cell).replace("|", "\\|") for cell in row) + " |"

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows for CSV, with all values of each row by name."""
        for category, row in self.rows.items():
            rates = {f"position_{place}": rate for place, rate in enumerate(row.get("acceptance", ()), start=1)}
            values = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            yield {**self.conditions, "category": category, **values, **rates}

    def _columns_and_cells(self) -> tuple[list[str], list[list[Any]]]:
        keys = [key for key in COLUMNS if any(key in row for row in self.rows.values())]
        places = min(SHOWN_POSITIONS, max(len(row.get("acceptance", ())) for row in self.rows.values()))
        columns = ["category", *map(COLUMNS.__getitem__, keys), *map(str, range(1, places + 1))]
        cells = []
        for category, row in self.rows.items():
            rates = [*row.get("acceptance", ()), *[None] * places][:places]
            cells.append([category, *(row.get(key) for key in keys), *rates])
        return columns, cells


def write_tables(
    tables: Sequence[SuiteTable], facts: Sequence[str], csv_name: str | None, markdown_name: str | None
) -> None:
    """Write all tables to a CSV file and a Markdown file, replacing existing ones; either name may be None.

    `facts` are lines about the measurement for the Markdown file.
    """
    if markdown_name is not None:
        lines = [f"- {fact}" for fact in (*facts, LEGEND)]
        lines += [line for table in tables for line in table.markdown()]
        write_atomically(Path(markdown_name), "\n".join(lines) + "\n")
    if csv_name is not None:
        records = [record for table in tables for record in table.records()]
        names = list(dict.fromkeys(name for record in records for name in record))
        names.sort(key=lambda name: name.startswith("position_"))  # last, however many the first table has
        text = StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_atomically(Path(csv_name), text.getvalue())
