"""Tables of measurements on a suite of questions: a row for each category, printed, as Markdown and as CSV.

Accepted length is counted in both ways that are in use: of all steps that had drafts, and as the mean of turns.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from typing import Any

from redrafter.files.atomic_file import write_atomically
from redrafter.measure.outputs import output_file
from redrafter.measure.report import cell_text, format_table
from redrafter.scheduler.sequence import Stats

SHOWN_POSITIONS = 8  # positions of drafts that printed and Markdown tables have; CSV has all
# What a column holds, by the key of a row, in the order of the columns; a table has those that a row of it has.
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
    "accepted, pooled: 1 + accepted drafts / steps that had drafts; of turns: the mean of that of each turn; "
    "1, 2, ...: share of the steps whose drafts were accepted up to there that accepted one more"
)
AVERAGED = ("accepted_length", "accepted_length_of_turns", "acceptance")


def describe_acceptance(total: Stats, turns: Sequence[Stats]) -> dict[str, Any]:
    """Return the entries of a row that say how many drafts were accepted in some turns; `total` is their sum."""
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
    """Return the mean of the values that are not None; None where there is none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def mean_of(entries: Sequence[Mapping[str, Any]], names: Sequence[str] = AVERAGED) -> dict[str, Any]:
    """Return the means of entries of the same names: of numbers, or of lists element by element, however long."""
    means: dict[str, Any] = {}
    for name in names:
        values = [entry[name] for entry in entries]
        lists = any(isinstance(value, list) for value in values)
        means[name] = [mean(each) for each in zip_longest(*values)] if lists else mean(values)
    return means


@dataclass(frozen=True)
class SuiteTable:
    """Holds the rows that were measured on a suite under some conditions."""

    title: str
    conditions: Mapping[str, Any]  # that CSV has columns for
    rows: Mapping[str, Mapping[str, Any]]  # by category, and one or two of all; keys are those of `COLUMNS` and more

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
        """Yield the rows as CSV has them: with all that is known of each, by name."""
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


class TableFiles:
    """The files that tables are written to, as CSV and as Markdown; either may be left out."""

    def __init__(self, csv_name: str | None, markdown_name: str | None):
        """Check that the files can be written, as flags of these names ask for; raise `ArgumentError` if not."""
        self._csv, self._markdown = output_file(csv_name, "--csv"), output_file(markdown_name, "--markdown")

    def write(self, tables: Sequence[SuiteTable], facts: Sequence[str]) -> None:
        """Write all tables in place of what the files hold; `facts` are lines on how they were measured."""
        if self._markdown is not None:
            lines = [f"- {fact}" for fact in (*facts, LEGEND)]
            lines += [line for table in tables for line in table.markdown()]
            write_atomically(self._markdown, "\n".join(lines) + "\n")
        if self._csv is not None:
            records = [record for table in tables for record in table.records()]
            names = list(dict.fromkeys(name for record in records for name in record))
            names.sort(key=lambda name: name.startswith("position_"))  # last, however many the first table has
            text = StringIO()
            writer = csv.DictWriter(text, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
            write_atomically(self._csv, text.getvalue())
