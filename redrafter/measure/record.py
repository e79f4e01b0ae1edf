"""One measurement as one object: a row of the table that a command prints, and a line of `--json`."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers

from redrafter.files.atomic_file import write_atomically
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.differences import Difference
from redrafter.model.target import Target
from redrafter.scheduler.sequence import Stats
from redrafter.version import __version__

UNDRAFTED = "undrafted"  # the mode without drafts
PROMPT_LOOKUP = "prompt lookup"  # the mode whose drafts are copies from the text


@dataclass
class Record:
    """Holds the measurements of one mode of decoding on some prompts. A value that was not measured is None."""

    mode: str  # `UNDRAFTED`, a method of drafting, or the tree whose drafts were counted
    category: str | None = None  # of the prompts; None for prompts of all categories
    temperature: float = 0.0  # 0 for greedy decoding
    batch_size: int | None = None
    prompt_length: int | None = None  # tokens that the prompts were cut to; None for whole prompts
    texts: int = 0
    skipped: int | None = None  # turns of a suite whose prompts are too long
    tokens: int = 0  # new ones, of one repeat
    # Speed: medians over repeats, prefill included.
    seconds: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None  # in tokens per second, over undrafted decoding
    first_token_ms: float | None = None  # from the call to the first token of a batch
    ms_per_token: float | None = None  # of a row after its first token
    first_call_s: float | None = None  # of the first call at this batch size, which captures and may compile
    # Drafts, of one repeat. A step is one forward of the target over a tree.
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    emitted: int | None = None  # tokens of steps: not the first token of each text
    tokens_per_step: float | None = None
    drafts_per_step: float | None = None
    accepted_length: float | None = None  # 1 + accepted drafts / steps that had drafts
    accepted_length_of_texts: float | None = None  # the mean of that over texts
    accepted_by_depth: list[int] | None = None  # entry d counts the steps that accepted at least d + 1 drafts
    # Entry d: of the steps that accepted d drafts, the share with one more.
    acceptance: list[float | None] | None = None
    # The tokens of undrafted decoding, where the mode promises them.
    same: int | None = None  # texts that are equal
    near_ties: int | None = None  # of the others, those that rounding explains
    differences: list[Difference] | None = None  # the worst one of each text that differs
    # One step at the middle of the texts, in ms; floors are bytes by copy bandwidth.
    nodes: int | None = None
    step_ms: float | None = None
    draft_ms: float | None = None
    draft_floor_ms: float | None = None
    verify_ms: float | None = None
    verify_floor_ms: float | None = None
    rest_ms: float | None = None
    # The texts themselves.
    repeated: float | None = None  # share of the 4-grams that repeat an earlier one of their text
    ended: float | None = None  # share of the texts that ended by themselves
    misses: Mapping[str, Any] | None = None  # why drafts were missed
    error: str | None = None  # why there are no numbers

    def count(self, total: Stats, texts: Sequence[Stats]) -> "Record":
        """Set the counts of drafts from the statistics of texts and from their sum, and return the record."""
        lengths = [text.accepted_length for text in texts if text.accepted_length is not None]
        vars(self).update(describe_stats(total))
        self.tokens_per_step = total.tokens_per_step if total.steps else None
        self.drafts_per_step = total.drafted / total.steps if total.steps else None
        self.accepted_length, self.acceptance = total.accepted_length, total.acceptance
        self.accepted_length_of_texts = statistics.fmean(lengths) if lengths else None
        return self

    @property
    def kept(self) -> float | None:
        """Share of the verified drafts that were accepted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def agreement(self) -> str | None:
        """Describes how many texts equal those of undrafted decoding, for the table."""
        ties = f", {self.near_ties} near-ties" if self.near_ties else ""
        return None if self.same is None else f"{self.same} of {self.texts}{ties}"


class Conditions(TypedDict):
    """The environment of a measurement."""

    command: str
    hardware: str
    device: str
    dtype: str
    versions: dict[str, str | None]


def conditions(target: Target) -> Conditions:
    """Return the command, hardware, dtype and versions that every measurement records."""
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
    }


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


@dataclass
class Records:
    """The records of a command so far, which a file receives as lines of JSON after each addition.

    Each line also has the conditions, so that it can be read by itself; a command that is interrupted leaves the
    records of finished measurements.
    """

    conditions: Mapping[str, Any]
    path: str | None = None  # None for no file
    rows: list[Record] = field(default_factory=list)

    def add(self, *records: Record) -> None:
        """Append records, and replace the file."""
        self.rows += records
        if self.path is not None:
            lines = (json.dumps(to_json(record) | {"conditions": self.conditions}) + "\n" for record in self.rows)
            write_atomically(Path(self.path), "".join(lines))


def to_json(record: Record) -> dict[str, Any]:
    """Return the values of a record that are not None, as JSON has them."""
    values = {name: value for name, value in vars(record).items() if value is not None}
    if record.differences is not None:
        values["differences"] = [vars(difference) for difference in record.differences]
    return values


def describe_stats(stats: Stats) -> dict[str, Any]:
    """Return the counts of speculation under their names in `Record` and in JSON documents."""
    names = ("steps", "drafted", "accepted", "emitted", "tokens_per_step", "accepted_by_depth")
    return {name: getattr(stats, name) for name in names}


def drafts_left_out(stats: Stats, mode: str) -> str:
    """Say in how many steps a method drafted nothing, and why; nothing where it drafted in most of them."""
    if mode == UNDRAFTED or 2 * stats.undrafted_steps <= stats.steps:
        return ""
    gain = "" if stats.accepted_length is None else f": {stats.accepted_length:.2f} tokens per drafted step here"
    why = ", as the text repeats too little" if mode == PROMPT_LOOKUP else ", which cost more time than they gain"
    return f"; {stats.undrafted_steps} of {stats.steps} steps left out drafts{why}{gain} (docs/acceptance.md)"
