"""Options of the commands. A default stands here once: flags and their help are made from the fields."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from redrafter.errors import ArgumentError

__all__ = ["GenerationOptions", "LoadOptions", "add_options", "read_options"]

T = TypeVar("T")

_METAVARS = {int: "N", float: "X"}


def _option(default: Any, help: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help, **argument})


@dataclass(frozen=True)
class LoadOptions:
    """What to load, and how."""

    model: str | None = _option(
        None, "hub id or directory of the target, or of a merged checkpoint (default: the boxed pair)", metavar="M"
    )
    drafter: str | None = _option(
        None, "hub id or directory of the drafter (default: the one in the merged checkpoint)", metavar="D"
    )
    num_beams: int | None = _option(None, "beams of the drafter's search (default: the checkpoint's)", type=int)
    draft_len_per_beam: int | None = _option(None, "tokens drafted per beam (default: the checkpoint's)", type=int)
    node_budget: int | None = _option(
        None,
        "drafts verified per step, counting the root (default: the checkpoint's, or what suits the device)",
        type=int,
    )
    dtype: str = _option("auto", "number format", choices=("auto", "float32", "bfloat16", "float16"))
    device: str | None = _option(None, "cpu, cuda, cuda:1, ... (default: cpu)")
    trust_remote_code: bool = _option(False, "run the modelling code that comes with the model")


@dataclass(frozen=True)
class GenerationOptions:
    """How to write. Names and meanings are Hugging Face's; None leaves it to the model's generation config."""

    max_new_tokens: int = _option(128, "most tokens to write", type=int)
    temperature: float = _option(0.0, "0 is greedy; above, sample", type=float)
    top_k: int | None = _option(None, "sample from the k likeliest tokens", type=int)
    top_p: float | None = _option(None, "sample from the likeliest tokens that hold this much probability", type=float)
    min_p: float | None = _option(
        None, "sample from tokens at least this likely, relative to the likeliest", type=float
    )
    repetition_penalty: float | None = _option(None, "above 1, what was written becomes less likely", type=float)
    seed: int | None = _option(None, "of the sampling; the same seed gives the same text (default: fresh)", type=int)
    stop: Sequence[str] = _option((), "end after this text (may be repeated)", action="append", metavar="TEXT")
    speculate: bool = _option(True, "plain decoding, without the drafter")

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and self.temperature == 0:
                raise ArgumentError(f"--{name.replace('_', '-')} is for sampling: give --temperature above 0 too")
        if "" in self.stop:
            raise ArgumentError("--stop needs a text, got an empty one")

    @property
    def sampling(self) -> bool:
        return self.temperature > 0


def add_options(parser: argparse.ArgumentParser, options: type, title: str) -> None:
    """Add a flag for every field of a dataclass of options. A field that is True by default gets `--no-...`."""
    group = parser.add_argument_group(title)
    for each in fields(options):
        argument = dict(each.metadata)
        negated = each.default is True
        if isinstance(each.default, bool):
            argument["action"] = "store_false" if negated else "store_true"
        elif each.default not in (None, ()):
            argument["help"] += f" (default: {each.default})"
        if argument.get("type") in _METAVARS:
            argument["metavar"] = _METAVARS[argument["type"]]
        flag = ("no-" if negated else "") + each.name.replace("_", "-")
        group.add_argument(f"--{flag}", dest=each.name, default=argparse.SUPPRESS, **argument)


def read_options(options: type[T], args: argparse.Namespace) -> T:
    """The dataclass from what was typed; what was not keeps its default."""
    given = vars(args)
    return options(**{each.name: given[each.name] for each in fields(options) if each.name in given})  # type: ignore
