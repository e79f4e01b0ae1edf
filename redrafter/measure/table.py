"""Show records as one table: text, CSV, Markdown, or a picture."""

import csv
from collections.abc import Collection, Iterable, Iterator, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_atomically
from redrafter.measure.record import Record, describe_differences, to_json

MIN_WIDTH = 5  # of a column: the width of a share with three decimals
SHOWN_POSITIONS = 8  # of drafts, in a table; CSV has all
SPEED = ("tok/s", "speedup", "tokens/step", "same texts")  # columns that compare modes
# Fields that identify a record get a column where records differ; measured ones where any record has a value.
IDENTITY = {"category": "category", "T": "temperature", "batch": "batch_size", "prompt": "prompt_length"}
MEASURED = {
    **{"texts": "texts", "skipped": "skipped", "tok/s": "tokens_per_second", "speedup": "speedup"},
    **{"tokens/step": "tokens_per_step", "drafts/step": "drafts_per_step", "accepted": "accepted_length"},
    **{"of texts": "accepted_length_of_texts", "kept": "kept", "same texts": "agreement"},
    **{"first ms": "first_token_ms", "token ms": "ms_per_token", "step ms": "step_ms", "draft": "draft_ms"},
    **{"floor": "draft_floor_ms", "verify": "verify_ms", "its floor": "verify_floor_ms", "rest": "rest_ms"},
    **{"repeated": "repeated", "ended": "ended"},
}


def table_of(records: Sequence[Record], shown: Collection[str]) -> tuple[list[str], list[list[object]]]:
    """Return the columns and the cells of a table with a row for each record.

    Of the columns `shown`, those have a place where any record has a value; "1" shows acceptance by position.
    """
    names = {title: name for title, name in IDENTITY.items() if len({getattr(each, name) for each in records}) > 1}
    names |= {
        title: name
        for title, name in MEASURED.items()
        if title in shown and any(getattr(each, name) is not None for each in records)
    }
    depth = max(len(each.acceptance or ()) for each in records) if "1" in shown else 0
    places = range(min(SHOWN_POSITIONS, depth))
    cells: list[list[object]] = []
    for each in records:
        rates = [*(each.acceptance or ()), *[None] * depth]
        cells.append([each.mode, *(getattr(each, name) for name in names.values()), *(rates[at] for at in places)])
    return ["", *names, *(str(place + 1) for place in places)], cells


def format_records(records: Sequence[Record], shown: Collection[str]) -> Iterator[str]:
    """Yield the lines of the table of records, followed by where texts differ and why a mode failed."""
    yield from format_table(*table_of(records, shown))
    for record in records:
        if record.category is None:
            yield from describe_differences(record.differences or (), record.mode)
        if record.error is not None:
            yield f"{record.mode} failed: {record.error}"


def format_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table whose rows are all known, each column as wide as its widest cell.

    The first line has the names of the columns. All columns but the first are aligned right.
    """
    lines = [list(map(cell_text, line)) for line in (columns, *rows)]
    widths = [max(MIN_WIDTH, *map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield ("  " + "  ".join(cells)).rstrip()


def format_markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield "| " + " | ".join(cell_text(cell).replace("|", "\\|") for cell in row) + " |"


def cell_text(value: object) -> str:
    """Format a value for a table."""
    match value:
        case None:
            return "-"
        case bool():  # also an int, so match it first
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def write_csv(path: str, records: Sequence[Record]) -> None:
    """Write a line for each record, with all its numbers by name; `position_1` is the acceptance of first drafts."""
    lines = []
    for record in records:
        values = {name: value for name, value in to_json(record).items() if not isinstance(value, list | dict)}
        lines.append(values | {f"position_{n}": rate for n, rate in enumerate(record.acceptance or (), start=1)})
    names = sorted(dict.fromkeys(x for line in lines for x in line), key=lambda x: x.startswith("position_"))
    text = StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(Path(path), text.getvalue())


def draw(path: str, records: Sequence[Record], conditions: str) -> None:
    """Draw records into a `.png`, a line for each: acceptance by depth and, where it was measured, the speedup."""
    from matplotlib.figure import Figure  # not pyplot, which selects a window system's backend

    timed = [record for record in records if record.speedup is not None]
    groups = sorted({(each.temperature, each.prompt_length or 0) for each in records if each.acceptance})
    figure = Figure(figsize=(1 + 6 * max(len(groups) + bool(timed), 1), 5), layout="constrained")
    panels: list[Any] = list(figure.subplots(ncols=max(len(groups) + bool(timed), 1), squeeze=False)[0])
    for axes, group in zip(panels, groups, strict=False):
        for each in records:
            if each.acceptance and (each.temperature, each.prompt_length or 0) == group:
                points = [(depth, rate) for depth, rate in enumerate(each.acceptance, 1) if rate is not None]
                what = " ".join(str(x) for x in (each.mode, each.category, each.batch_size) if x is not None)
                axes.plot(*zip(*points, strict=True), "o-", ms=4, label=f"{what}: {each.tokens_per_step or 0:.2f}")
        length = f", prompts of {group[1]} tokens" if group[1] else ""
        axes.set(title=f"temperature {group[0]:g}{length}", xlabel="depth of the draft", ylim=(0, 1))
        axes.set_ylabel("share accepted, of those whose parent was (tokens per step)")
        axes.legend(fontsize=8, frameon=False)
    for mode in dict.fromkeys(each.mode for each in timed):
        own = [each for each in timed if each.mode == mode and each.category is None]
        points = [(each.batch_size or 1, each.speedup or 0.0) for each in own]
        panels[-1].plot(*zip(*points, strict=True), "o-", label=mode)
        panels[-1].set(xlabel="rows in a batch", ylabel="tokens per second, times undrafted decoding's", xscale="log")
        panels[-1].legend(fontsize=8, frameon=False)
    figure.supxlabel(conditions, fontsize=7)
    png = BytesIO()
    figure.savefig(png, dpi=144, format="png")
    write_atomically(Path(path), png.getvalue())
