"""Every option of the trainer, each with its default and its help text, once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from redrafter.app import flags
from redrafter.app.config_file import ConfigParser
from redrafter.app.flags import add_options, flag, integers, names, option, read_options
from redrafter.errors import ArgumentError

__all__ = ["LENGTH", "TRACKERS", "TrainConfig", "parse", "shown_command"]

DTYPES = ("float32", "bfloat16", "float16")
TRACKERS = ("tensorboard", "wandb", "trackio")
LENGTH = 512
# What would fill any memory, and what the integers and the float32 of a machine do not hold.
MOST: dict[str, float] = dict.fromkeys(("num_layers", "exit_dim", "head_rank", "draft_len", "batch_size"), 1 << 16)
MOST |= dict.fromkeys(("lr", "weight_decay", "max_grad_norm"), 1e36)
MOST |= {"length": 1 << 24, "seed": 1 << 62}


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, how long and how. The command line is made from these fields.

    `train` reads only those from `steps` on; a caller with its own model and batches leaves the others alone.
    """

    model: str | None = option(None, "base model: a hub id or a directory", required=True)
    data: tuple[str, ...] = option((), "texts: JSON lines, .jsonl, .jsonl.gz or .jsonl.xz", required=True, path=True)
    output: str | None = option(None, "directory that receives the drafter", required=True, path=True)
    overwrite: bool = option(False, "replace the drafter that --output holds, and drop its checkpoints")
    resume: bool = option(False, "go on from the newest checkpoint, or begin where there is none")
    dry_run: bool = option(False, "say what would be trained and how much memory it takes, and do nothing")
    show_sample: bool = option(False, "print the first text of the data, what is learnt of it marked, and do nothing")
    drafter: str | None = option(None, "go on with this drafter instead of a new one", path=True)
    trust_remote_code: bool = option(False, "run model code that comes with the base")
    dtype: str = option("auto", "the base's dtype; auto: as saved", choices=("auto", *DTYPES))
    save_dtype: str = option("float32", "the saved drafter's dtype", choices=DTYPES)
    num_layers: int = option(2, "residual layers of a new drafter")
    exit_dim: int | None = option(None, "width of a new drafter's head; twice the base's hidden size when not given")
    rnn: bool = option(True, "whether a new drafter learns its recurrence")
    recurrence: str = option("apple", "a new drafter's cell, the published or a gated one", choices=("apple", "gated"))
    target_layers: tuple[int, ...] = option(
        (),
        "the base's decoder layers whose outputs a new drafter reads beside the last hidden state",
        type=integers,
        metavar="N,...",
    )
    head_rank: int | None = option(
        None, "a new drafter's head goes through so many dimensions; straight when not given"
    )
    draft_vocab_size: int | None = option(
        None, "a new drafter knows only this many ids, the most frequent of the data; all when not given"
    )
    length: int | None = option(
        None, f"tokens in a row of a batch; longer documents are cut (default: {LENGTH}, or the base's context if less)"
    )
    pack: bool = option(True, "whether short documents share a row")
    epochs: float | None = option(None, "passes over the data; 1 when no end is given")
    validate: str | None = option(None, "texts to validate on; rows of --data with split val when not given", path=True)
    validate_prompts: int = option(32, "prompts that the base continues for validation; 0: none")
    validate_tokens: int = option(64, "tokens in each continuation")
    report_to: tuple[str, ...] = option(
        (), "trackers to log to: tensorboard, wandb, trackio", type=names, metavar="NAME,..."
    )
    keep: int = option(2, "newest checkpoints to keep, beside the best drafter")

    steps: int | None = option(None, "optimizer steps; the end is the first of steps, epochs and minutes")
    minutes: float | None = option(None, "time to train for, counted from the end of the first step")
    batch_size: int = option(8, "rows read at once, on each process")
    accumulate: int = option(1, "batches in an optimizer step, on each process")
    draft_len: int = option(5, "steps that the drafter is unrolled for")
    distill: float = option(0.9, "weight of KL(base || drafter); the rest is cross-entropy of the text's own tokens")
    decay: float = option(0.9, "weight of each draft step relative to the one before")
    reach: float = option(
        0.0,
        "acceptance-aware weighting: how much less a draft step weighs where an earlier one would not have been among "
        "the beams; from 0 to 1",
    )
    lr: float = option(1e-3, "peak learning rate; it follows a cosine down to 0")
    warmup: float = option(0.03, "part of the training in which the learning rate rises from 0")
    weight_decay: float = option(0.0, "decay of matrices")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    chunk: int | None = option(
        None, "predictions whose logits are in memory at once; on a GPU as many as 512 MiB hold when not given"
    )
    compile: bool = option(False, "torch.compile the drafter's loss")
    mixed_precision: str | None = option(
        None, "the drafter's autocast; as accelerate is configured when not given", choices=("no", "fp16", "bf16")
    )
    cpu: bool = option(False, "stay on the CPU even where there is a GPU")
    shard_base: bool = option(False, "spread the base over the processes' devices, for one too large for each")
    seed: int = option(0, "of the drafter's first weights and the order of the data")
    log_every: int = option(10, "steps between lines of progress")
    validate_every: int | None = option(
        None, "steps between validations, of which the best drafter is kept; only at the end when not given"
    )
    save_every: int | None = option(None, "steps between checkpoints, in OUTPUT.checkpoints; none when not given")

    def __post_init__(self) -> None:
        optional = ("length", "steps", "epochs", "minutes", "exit_dim", "head_rank", "draft_vocab_size", "chunk")
        every = ("log_every", "validate_every", "save_every", "keep")
        sizes = ("batch_size", "accumulate", "draft_len", "validate_tokens")
        for name in (*sizes, *every, "decay", "lr", "max_grad_norm", *optional):
            if not (getattr(self, name) is None or 0 < getattr(self, name) < math.inf):
                raise ArgumentError(f"{flag(name)} must be positive, got {getattr(self, name)}")
        for name in ("num_layers", "weight_decay", "validate_prompts", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"{flag(name)} must not be negative, got {getattr(self, name)}")
        for name in ("distill", "decay", "warmup", "reach"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{flag(name)} must be from 0 to 1, got {getattr(self, name)}")
        for each in fields(self):
            value, most = getattr(self, each.name), MOST.get(each.name, 1 << 31)
            if type(value) in (int, float) and value > most and each.name not in ("epochs", "minutes"):
                raise ArgumentError(f"{flag(each.name)} must be at most {most}, got {value}")
        if self.length is not None and self.length < 3:
            raise ArgumentError(f"--length must be at least 3 (a text, a pending token, a draft), got {self.length}")
        for name in self.report_to:
            if name not in TRACKERS:
                raise ArgumentError(f"--report-to knows {', '.join(TRACKERS)}, got {name!r}")


def parse(argv: Sequence[str] | None) -> TrainConfig:
    """The config that a command line asks for: one flag for each field of `TrainConfig`."""
    parser = ConfigParser(
        prog="redrafter train",
        description="Train a recurrent drafter for a Hugging Face causal LM.",
        options=(TrainConfig,),
    )
    add_options(parser, TrainConfig, "training")
    return read_options(TrainConfig, parser.parse_args(argv))


def shown_command(config: TrainConfig) -> str:
    """The command line of a config."""
    return flags.format_command(["redrafter", "train"], config)
