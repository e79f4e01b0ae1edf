"""Report measurements: conditions, tables on stdout, progress on stderr, pictures, and one JSON document."""

import json
import math
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers

from redrafter.cache.kv_cache import stored_as
from redrafter.errors import ReDrafterError, first_line
from redrafter.files.atomic_file import write_atomically
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.floors import slot_bytes
from redrafter.measure.run import Workload
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.target import Target
from redrafter.version import __version__

MIN_WIDTH = 5  # of a column of `format_table`: the width of a share with three decimals


def versions() -> dict[str, str | None]:
    """Return the versions of all software that affects a measurement; `cuda` is None without CUDA."""
    return {
        "redrafter": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def hardware(device: torch.device) -> str:
    """Describe a device, e.g. `NVIDIA H200, 140 GiB` or `x86_64 CPU, 2 threads`."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


class Conditions(TypedDict):
    """The entries of a measurement document that describe the command and its environment."""

    command: str
    hardware: str
    device: str
    dtype: str
    versions: dict[str, str | None]


class Names(TypedDict):
    """The model, the drafter and the prompts of a benchmark, and the note about a padded model."""

    model: str
    drafter: str | None
    prompts: str
    padded: str | None


class PromptLengths(TypedDict):
    """The number of prompts and the range of their lengths in tokens."""

    prompts: int
    shortest: int
    longest: int


class StepBytes(TypedDict):
    """The bytes that a step reads: weights per forward and per draft, keys and values per token."""

    weights_per_forward: int
    drafter_weights_per_step: int
    keys_and_values_per_token: int


class Facts(Conditions, Names):
    """The conditions of a benchmark."""

    seed: int
    temperature: float
    max_new_tokens: int
    end_of_text: str
    prompt_tokens: PromptLengths
    processes: int
    captured_steps: bool
    why_not_captured: str | None
    bytes: StepBytes
    prefix_reuse: str
    options: dict[str, object]


def conditions(target: Target) -> Conditions:
    """Return the command, hardware, dtype and versions that every measurement document records."""
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
    }


def facts(work: Workload, names: Names, options: dict[str, object]) -> Facts:
    """Return the conditions of a benchmark, with which its JSON document begins."""
    engine, target = work.engine, work.engine.target
    lengths = [len(prompt) for prompt in work.prompts]
    stored = stored_as(target.shapes, engine.options.kv_dtype)
    return {
        **conditions(target),
        **names,
        "seed": work.seed,
        "temperature": work.temperature,
        "max_new_tokens": work.max_new_tokens,
        "end_of_text": "ends an answer" if work.ends else "ignored",
        "prompt_tokens": {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)},
        "processes": target.ranks.size,
        "captured_steps": target.varlen.ok,
        "why_not_captured": target.varlen.reason,
        "bytes": {
            "weights_per_forward": forward_bytes(engine.model),
            "drafter_weights_per_step": engine.proposer.draft_bytes,
            "keys_and_values_per_token": slot_bytes(stored),
        },
        "prefix_reuse": "none: every run reads its prompts from the first token on",
        "options": options,
    }


def describe_pair(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines that state the command, the pair, the hardware and the versions of a document."""
    drafter = f", drafter {document['drafter']}" if "drafter" in document else ""
    yield from filter(None, [document["command"], document.get("padded")])
    yield f"{document['model']}{drafter}, {document['dtype']}"
    yield f"{document['hardware']}; {describe_versions(document['versions'])}"


def describe_versions(versions: Mapping[str, str | None]) -> str:
    """Format versions, such as `redrafter 1.0, torch 2.5`."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def head(document: Facts) -> Iterator[str]:
    """Yield the heading lines of a printed report, from the document that `facts` returned."""
    prompts, size = document["prompt_tokens"], document["bytes"]
    yield from describe_pair({**document})
    yield (
        f"{prompts['prompts']} prompts of {prompts['shortest']} to {prompts['longest']} tokens from "
        f"{document['prompts']}; {document['max_new_tokens']} new tokens, end of text {document['end_of_text']}; "
        f"temperature {document['temperature']:g}, seed {document['seed']}"
    )
    yield (
        f"read per forward: {size['weights_per_forward'] / 1e9:.3f} GB of weights, "
        f"{size['keys_and_values_per_token'] / 1e3:.1f} kB a token of keys and values; "
        f"per step by the drafter: {size['drafter_weights_per_step'] / 1e9:.3f} GB"
    )
    why_not = document["why_not_captured"]
    yield "steps are captured CUDA graphs" if document["captured_steps"] else f"steps are not captured: {why_not}"


class Report:
    """A report that is printed as it grows and saved after every addition.

    In its `document`, `errors` lists the sections that failed, and `complete` is true once the run has ended. The file,
    if any, is replaced at each addition, so that a run that is cut short leaves what it has measured. The note is a
    sentence printed with every table.
    """

    def __init__(self, facts: Mapping[str, object], *, path: str | Path | None = None, note: str | None = None):
        """Begin a report with the conditions of the measurement."""
        self.document: dict[str, Any] = {**facts, "complete": False, "errors": []}
        self.path, self.note, self._start = None if path is None else Path(path), note, time.perf_counter()

    def progress(self, text: str) -> None:
        """Print a line on stderr, after the seconds since the report began."""
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def line(self, *texts: str) -> None:
        """Print lines on stdout."""
        for text in texts:
            print(text, flush=True)

    def table(self, title: str, columns: Sequence[tuple[str, int]]) -> Callable[..., None]:
        """Return a function that prints a row of a new table with `(name, width)` of each column, given its cells.

        Title and column names are printed before the first row. All cells but the first are aligned right.
        """
        names, widths = zip(*columns, strict=True)
        begun = False

        def row(*cells: object) -> None:
            nonlocal begun
            # A section may fail before its first row, and a heading without rows would mislead.
            if not begun:
                begun = True
                self.line(f"\n{title}", *filter(None, [self.note]), _line(names, widths))
            self.line(_line(cells, widths))

        return row

    def add(self, name: str, item: object) -> None:
        """Append `item` to the list `name` of the document, and save."""
        self.document.setdefault(name, []).append(plain_data(item))
        self.save()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run the body; print an exception and add it to the document's `errors`, so that the run continues.

        With any `errors`, the exit code is 1.
        """
        self.progress(name)
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            self.line(f"{name} failed: {message}")
            # A user error needs no traceback; anything else is a bug in a section.
            if not isinstance(error, ReDrafterError):
                traceback.print_exc()
            self.add("errors", {"section": name, "error": message})

    def save(self) -> None:
        """Atomically replace the file with the current document."""
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


def format_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, indent: str = "  ") -> Iterator[str]:
    """Yield the lines of a table whose rows are all known, each column as wide as its widest cell.

    The first line has the names of the columns. All columns but the first are aligned right.
    """
    lines = [columns, *rows]
    widths = [max(MIN_WIDTH, *(len(cell_text(cell)) for cell in column)) for column in zip(*lines, strict=True)]
    yield from (indent + _line(cells, widths, gap="  ") for cells in lines)


def _line(cells: Sequence[object], widths: Sequence[int], gap: str = " ") -> str:
    first, *rest = zip(map(cell_text, cells), widths, strict=True)
    return gap.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()


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


def plain_data(value: object) -> object:
    """Convert `value` to JSON types: dataclasses to objects, infinity and NaN to null, other objects to strings."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            # JSON has no NaN or infinity.
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): plain_data(item) for key, item in value.items()}
        case list() | tuple():
            return [plain_data(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    return str(value)


@contextmanager
def drawing(path: Path, conditions: str = "", size: tuple[float, float] = (8, 5), **grid: Any) -> Iterator[Any]:
    """Yield matplotlib axes to draw on, and write them to a PNG file when the context exits.

    `conditions` is printed below the picture. `grid` are arguments of `Figure.subplots`, for several axes.
    """
    from matplotlib.figure import Figure  # not pyplot, which selects a window system's backend

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(**grid)
    figure.supxlabel(conditions, fontsize=7)
    png = BytesIO()
    figure.savefig(png, dpi=144, format="png")
    write_atomically(path, png.getvalue())
