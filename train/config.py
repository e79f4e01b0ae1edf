"""Every option of the trainer, each with its default and its help text, once."""

import argparse
import shlex
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from redrafter.errors import ArgumentError

__all__ = ["TrainConfig", "parse", "shown_command"]

DTYPES = ("float32", "bfloat16", "float16")


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, how long and how. The command line is made from these fields.

    `train` reads only those from `steps` on; a caller with its own model and batches leaves the others alone.
    """

    model: str | None = _option(None, "base model: a hub id or a directory", required=True)
    data: tuple[str, ...] = _option((), "texts: JSON lines, .jsonl, .jsonl.gz or .jsonl.xz", required=True, path=True)
    output: str | None = _option(None, "directory that receives the drafter", required=True, path=True)
    overwrite: bool = _option(False, "replace the drafter that --output holds")
    drafter: str | None = _option(None, "go on with this drafter instead of a new one", path=True)
    trust_remote_code: bool = _option(False, "run model code that comes with the base")
    dtype: str = _option("auto", "the base's dtype; auto: as saved", choices=("auto", *DTYPES))
    save_dtype: str = _option("float32", "the saved drafter's dtype", choices=DTYPES)
    num_layers: int = _option(2, "residual layers of a new drafter")
    exit_dim: int | None = _option(None, "width of a new drafter's head; twice the base's hidden size when not given")
    rnn: bool = _option(True, "whether a new drafter learns its recurrence")
    draft_vocab_size: int | None = _option(
        None, "a new drafter knows only this many ids, the most frequent of the data; all when not given"
    )
    length: int = _option(512, "tokens in a window; longer documents are cut")
    epochs: float | None = _option(None, "passes over the data; 1 when no end is given")
    validate: str | None = _option(
        None, "texts to validate on; rows of --data with split val when not given", path=True
    )
    validate_prompts: int = _option(32, "prompts that the base continues for validation; 0: none")
    validate_tokens: int = _option(64, "tokens in each continuation")

    steps: int | None = _option(None, "optimizer steps; the end is the first of steps, epochs and minutes")
    minutes: float | None = _option(None, "time to train for, counted from the end of the first step")
    batch_size: int = _option(8, "windows in a step, on each process")
    draft_len: int = _option(5, "steps that the drafter is unrolled for")
    distill: float = _option(0.9, "weight of KL(base || drafter); the rest is cross-entropy of the text's own tokens")
    decay: float = _option(0.9, "weight of each draft step relative to the one before")
    lr: float = _option(1e-3, "peak learning rate; it follows a cosine down to 0")
    warmup: float = _option(0.03, "part of the training in which the learning rate rises from 0")
    weight_decay: float = _option(0.0, "AdamW's decay of matrices")
    max_grad_norm: float = _option(1.0, "gradients are clipped to this norm")
    chunk: int = _option(1024, "anchors whose draft logits are in memory at once; bounds memory, not the result")
    compile: bool = _option(False, "torch.compile the drafter's loss")
    mixed_precision: str | None = _option(
        None, "the drafter's autocast; as accelerate is configured when not given", choices=("no", "fp16", "bf16")
    )
    cpu: bool = _option(False, "stay on the CPU even where there is a GPU")
    seed: int = _option(0, "of the drafter's first weights and the order of the data")
    log_every: int = _option(10, "steps between lines of progress")
    validate_every: int | None = _option(None, "steps between validations; only at the end when not given")

    def __post_init__(self) -> None:
        optional = ("steps", "epochs", "minutes", "exit_dim", "draft_vocab_size", "validate_every")
        sizes = ("length", "batch_size", "draft_len", "chunk", "log_every", "validate_tokens")
        for name in (*sizes, "decay", "lr", "max_grad_norm", *optional):
            if not (getattr(self, name) is None or getattr(self, name) > 0):
                raise ArgumentError(f"{_flag(name)} must be positive, got {getattr(self, name)}")
        for name in ("num_layers", "weight_decay", "validate_prompts", "seed"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{_flag(name)} must not be negative, got {getattr(self, name)}")
        for name in ("distill", "decay", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{_flag(name)} must be from 0 to 1, got {getattr(self, name)}")
        if self.length < 3:
            raise ArgumentError(f"--length must be at least 3 (a text, a pending token, a draft), got {self.length}")


def parse(argv: Sequence[str] | None) -> TrainConfig:
    """The config that a command line asks for: one flag for each field of `TrainConfig`."""
    parser = argparse.ArgumentParser(
        prog="redrafter train",
        description="Train a recurrent drafter for a Hugging Face causal LM.",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainConfig)
    for item in fields(TrainConfig):
        shown = "" if item.default in (None, ()) else f" (default: {item.default})"
        options: dict[str, Any] = {"default": item.default, "help": item.metadata["help"] + shown}
        options["required"] = item.metadata.get("required", False)
        if hints[item.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(hints[item.name]) is tuple:
            options |= {"nargs": "+", "metavar": item.name.upper()}
        else:
            options |= {"type": _plain(hints[item.name]), "choices": item.metadata.get("choices")}
        parser.add_argument(_flag(item.name), **options)
    given: dict[str, Any] = vars(parser.parse_args(argv))
    given["data"] = tuple(given["data"])
    return TrainConfig(**given)


def shown_command(config: TrainConfig) -> str:
    """The command line of a config, options at their defaults left out and files without their folders."""
    words = ["redrafter", "train"]
    for item in fields(config):
        value = getattr(config, item.name)
        if value == item.default or item.default is MISSING:
            continue
        if isinstance(value, bool):
            words.append(_flag(item.name) if value else _flag(item.name).replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [_flag(item.name), *(_short(item, each) for each in values)]
    return shlex.join(words)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(hint: Any) -> Any:
    """`int | None` to `int`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _short(item: Field, value: Any) -> str:
    folder = item.metadata.get("path") or (item.name == "model" and Path(str(value)).is_dir())
    return Path(value).resolve().name if folder else str(value)
