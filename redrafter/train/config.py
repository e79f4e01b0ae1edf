"""Options of `redrafter train`, each with its default and its help text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from redrafter.app.config_file import ConfigParser, command_parser
from redrafter.app.flags import flag, integers, read_options
from redrafter.app.options import TemplateOptions
from redrafter.app.paths import check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.errors import ArgumentError
from redrafter.files.atomic_folder import check_output_folder
from redrafter.options import check_values, dtype_word, option
from redrafter.parallel.launched import launched_processes

RECORD_FILE = "training.json"
Log: TypeAlias = Callable[[str], object]  # prints a line
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "muon")
DEFAULT_LENGTH = 512  # tokens
# Peak learning rates of new weights, of a drafter that is trained further, and of its low-rank updates.
NEW_LR, FURTHER_LR, LOW_RANK_LR = 1e-3, 5e-4, 3e-3
# Options that define the form of a new drafter; a drafter to train further already has one.
FORM_OPTIONS = ("form", "recurrence", "num_layers", "target_layers", "context_window", "head_rank", "draft_vocab_size")
# The options that each form supports. DFlash2's selector knows all ids.
FORMS = {
    "recurrent": FORM_OPTIONS,
    "eagle3": ("form", "target_layers", "draft_vocab_size"),
    **dict.fromkeys(("dflash", "dspark"), ("form", "num_layers", "target_layers", "draft_vocab_size")),
    "dflash2": ("form", "num_layers", "target_layers"),
}
MAX_SIZE = 1 << 24  # upper bound of numbers of tokens, rows and weights: larger ones exceed any memory

SMALL_BASE = 3_000_000_000  # parameters; small was measured at 135M and 1.5B, large at 135M alone


@dataclass(frozen=True)
class Recipe:
    """Options of a training, the bases that they suit, and the result that was measured with them.

    It holds only what differs from the command's defaults or was measured at another value. The form's other sizes
    follow the base (`init_drafter.new_config`).
    """

    suits: str
    options: dict[str, Any]  # values of `TrainConfig`'s fields, for those that neither a flag nor a file sets
    measured: str


RECIPES = {
    # At 135M parameters the default form is a quarter of the base: its head alone reads 25M numbers at each draft step.
    "small": Recipe(
        f"bases of fewer than {SMALL_BASE // 10**9}B parameters, and CPUs",
        {
            "num_layers": 2,
            "head_rank": 320,
            "draft_vocab_size": 16_384,
            "batch_size": 32,
            "lr": 2e-3,
            "save_dtype": "bfloat16",
        },
        "on SmolLM2-135M-Instruct, accepted length 3.84 greedily and 2.67 at T=1 (MT-Bench) after two passes over 30M "
        "tokens of its own text, 6.3 minutes of a shared H200 with --compile --mixed-precision bf16; on "
        "Qwen2.5-Coder-1.5B-Instruct 5.12 and 4.55 (HumanEval) after 2.2 passes over 23M tokens, 9 minutes of an H200",
    ),
    "large": Recipe(
        f"bases of {SMALL_BASE // 10**9}B parameters and more, on GPUs",
        {"dtype": "bfloat16", "length": 2048, "batch_size": 8, "mixed_precision": "bf16", "compile": True},
        "on no base of this size; on SmolLM2-135M-Instruct the same form has accepted length 3.34 greedily and 2.43 at "
        "T=1 (MT-Bench) after six passes over 3.3M tokens of its own text, 2 minutes of an H200 with --lr 0.002",
    ),
}


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` if `save_drafter` cannot write to `output`, or must not replace its content."""
    check_output_folder(output, overwrite, flag="--output", kinds=("drafter",))


def checkpoints_folder(output: Path) -> Path:
    """Return the folder of checkpoints for the output folder of a training."""
    return output.with_name(output.name + ".checkpoints")


def check_no_checkpoints(output: Path) -> None:
    """Raise `ArgumentError` if checkpoints of an earlier training exist.

    For a training with neither `--resume` nor `--overwrite`.
    """
    if (folder := checkpoints_folder(output)).exists():
        raise ArgumentError(
            f"{folder} holds an earlier training's checkpoints; continue with --resume, or start again with --overwrite"
        )


def layers(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers of layers, such as "8,16,24", or "none"."""
    return () if text == "none" else integers(text)


@dataclass(frozen=True)
class TrainConfig(TemplateOptions):
    """Train a drafter for a Hugging Face causal LM.

    Attributes:
        model: base model: a hub id, a directory or a GGUF file
        data: texts: JSON lines, .jsonl, .jsonl.gz or .jsonl.xz; or what datasets reads
        output: directory to write the drafter to
        overwrite: replace the drafter that --output holds, and drop its checkpoints
        resume: resume from the newest checkpoint, or start from scratch if there is none
        dry_run: print the sizes, the memory and the steps of the training, then exit
        show_sample: print the first text of the data with the trained parts marked, then exit
        drafter: train this drafter further instead of a new one; current: the one that --output holds, or else the
            base's own
        watch: train continuously in rounds, each on the new files in the directories of --data, and save after each
            round
        watch_rows: with --watch: number of new rows that start a round
        adapter: LoRA adapter that the base has: a directory that PEFT wrote; the drafter learns the output of both
        trust_remote_code: run model code that comes with the base
        dtype: dtype of the base; auto: as saved
        save_dtype: dtype of the saved drafter
        form: form of a new drafter: recurrent, this project's; eagle3, an EAGLE-3 head; or dflash, dspark or dflash2,
            which fill a block of --draft-len tokens in one pass. Other engines serve the last four too; their layers
            have the base's sizes, and of the options of a form eagle3 and blocks take --target-layers and
            --draft-vocab-size (not dflash2), blocks also --num-layers
        recurrence: recurrent cell of a new drafter: gated (the default), or apple, the published one; with apple, the
            options of its form below default to the published form, which alone Apple's and TensorRT-LLM's formats can
            hold
        num_layers: residual layers of a new drafter (default: 3; published form: 2), or decoder layers of blocks
            (default: 3)
        target_layers: decoder layers of the base, counted from 0, whose outputs a new drafter reads in addition to the
            last hidden state, or none (default: those at a quarter, a half and three quarters of its depth; published
            form: none; for blocks, the last but one too)
        context_window: pairs of a token of the text and the one after it that a new drafter attends to at each draft
            step, the nearest ones; 0 for none (default: 512, or --length, if that is less; published form: 0)
        head_rank: rank of a new drafter's head, which makes it smaller; 0 for full rank (default: a quarter of the
            hidden size, from 512 to 1024, or full rank where the width is no more; published form: 0)
        draft_vocab_size: token ids that a new drafter knows, the most frequent of the data (default: all)
        length: tokens in a row of a batch; longer documents are split (default: 512, or the base's context, if that is
            shorter)
        pack: pack several documents into a row; otherwise each has a separate padded row
        epochs: passes over the data (default: 1 when neither --steps nor --minutes is given)
        validate: texts to validate on (default: rows of --data with split val)
        validate_prompts: prompts that the base continues for validation; 0: no validation
        validate_tokens: tokens of each continuation
        steps: optimizer steps; training ends at the first of steps, epochs and minutes
        minutes: minutes to train for, counted from the end of the first step
        batch_size: rows of a batch, on each process
        accumulate: batches of an optimizer step, on each process
        lora_rank: train only updates of this rank of the linear layers of --drafter, whose own weights are frozen
            meanwhile, and save their sum (default: train all weights)
        draft_len: draft steps that the drafter is unrolled for
        distill: weight of the distillation, KL(base || drafter); the rest is cross-entropy of the text's tokens
        optimizer: adamw; or muon for hidden matrices, with AdamW for heads, embeddings and vectors, at the same
            learning rate
        lr: peak learning rate, which follows a cosine down to 0 (default: 0.001; with --drafter 0.0005, or 0.003 with
            --lora-rank)
        warmup: share of the training in which the learning rate rises from 0
        compile: compile the drafter's loss with torch.compile
        mixed_precision: autocast of the drafter (default: as accelerate is configured)
        cpu: train on the CPU even where there is a GPU
        shard_base: spread a base that is too large for one device over the devices of all processes
        seed: seed of the drafter's first weights and of the order of the data
        log_every: steps between lines of progress
        validate_every: steps between validations, after which the best drafter is kept (default: validate at the end
            only)
        save_every: steps between checkpoints, which are written to OUTPUT.checkpoints (default: no checkpoints)
    """

    # `redrafter.train.loop.train` reads only the fields from `steps` on; a caller with its own model and batches can
    # ignore the others. `recipe` names where values came from: the command line fills them in, and in Python
    # `TrainConfig(**RECIPES["small"].options)` does.
    model: str | None = option(None, required=True, names="model")
    data: tuple[str, ...] = option((), required=True, names="data")
    output: str | None = option(None, required=True, path=True)
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    show_sample: bool = False
    drafter: str | None = option(None, names="drafter or current")
    watch: bool = False
    watch_rows: int = 256
    adapter: str | None = option(None, names="adapter")
    recipe: str | None = option(
        None,
        "options that were measured together, where neither a flag nor a file sets them: "
        + "; ".join(f"{name}, for {recipe.suits}" for name, recipe in RECIPES.items()),
        choices=tuple(RECIPES),
    )
    trust_remote_code: bool = False
    dtype: str = option("auto", choices=("auto", *DTYPES), type=dtype_word)
    save_dtype: str = option("float32", choices=DTYPES, type=dtype_word)
    form: str = option("recurrent", choices=tuple(FORMS))
    recurrence: str | None = option(None, choices=("gated", "apple"))
    num_layers: int | None = None
    target_layers: tuple[int, ...] | None = option(None, type=layers, metavar="N,...")
    context_window: int | None = None
    head_rank: int | None = None
    draft_vocab_size: int | None = None
    length: int | None = None
    pack: bool = True
    epochs: float | None = None
    validate: str | None = option(None, names="data")
    validate_prompts: int = 32
    validate_tokens: int = 64
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    accumulate: int = 1
    lora_rank: int | None = None
    draft_len: int = 5
    distill: float = 0.9
    optimizer: str = option("adamw", choices=OPTIMIZERS)
    lr: float | None = None
    warmup: float = 0.03
    compile: bool = False
    mixed_precision: str | None = option(None, choices=("no", "fp16", "bf16"))
    cpu: bool = False
    shard_base: bool = False
    seed: int = 0
    log_every: int = 10
    validate_every: int | None = None
    save_every: int | None = None

    @property
    def peak_lr(self) -> float:
        """Peak learning rate: `lr`, or the default for new, pretrained or low-rank weights."""
        if self.lr is not None:
            return self.lr
        if self.lora_rank is not None:
            return LOW_RANK_LR
        return NEW_LR if self.drafter is None else FURTHER_LR

    def __post_init__(self) -> None:
        check_values(self)
        values, defaults = vars(self), {item.name: item.default for item in fields(self)}
        counts = ("num_layers", "context_window", "head_rank", "validate_prompts", "seed")  # which may be 0
        shares = ("distill", "warmup")
        for name, value in values.items():
            if type(value) not in (int, float) or name in shares:
                continue
            if not (value >= 0 if name in counts else value > 0) or value == math.inf:
                must = "must not be negative" if name in counts else "must be positive"
                raise ArgumentError(f"{flag(name)} {must}, got {value}")
            if value > MAX_SIZE and name not in ("steps", "epochs", "minutes", "seed", "lr"):
                raise ArgumentError(f"{flag(name)} must be at most {MAX_SIZE}, got {value}")
        for name in shares:
            if not 0 <= values[name] <= 1:
                raise ArgumentError(f"{flag(name)} must be from 0 to 1, got {values[name]}")
        if self.seed >> 62:
            raise ArgumentError(f"--seed must be less than {1 << 62}, got {self.seed}")
        # A recipe sets sizes that these options also determine.
        if self.recipe is not None and not RECIPES[self.recipe].options.keys().isdisjoint(FORM_OPTIONS):
            others = {
                "--drafter": self.drafter is not None,
                f"--form {self.form}": self.form != "recurrent",
                "--recurrence apple": self.recurrence == "apple",
            }
            for typed in (words for words, given in others.items() if given):
                message = f"--recipe {self.recipe} is for a new drafter with a gated cell: leave it out with {typed}"
                raise ArgumentError(message)
        for name in FORM_OPTIONS:
            if values[name] == defaults[name]:
                continue
            if self.drafter is not None:
                raise ArgumentError(f"{flag(name)} is the drafter's own: leave it out with --drafter")
            if name not in FORMS[self.form]:
                forms = " or ".join(form for form, options in FORMS.items() if name in options)
                raise ArgumentError(f"{flag(name)} is for --form {forms}: leave it out with --form {self.form}")
        if self.length is not None and self.length < 3:
            raise ArgumentError(f"--length must be at least 3 (a text, a pending token, a draft), got {self.length}")


def build_parser() -> ConfigParser:
    """Return the parser of the command."""
    return command_parser("redrafter train", (TrainConfig, "training", ()))


def parse(argv: Sequence[str] | None) -> TrainConfig:
    """Parse the arguments of the command; None parses `sys.argv[1:]`."""
    args = build_parser().parse_args(argv)
    recipe = getattr(args, "recipe", None)
    # Options given on the command line override the recipe's.
    for name, value in RECIPES[recipe].options.items() if recipe is not None else ():
        if not hasattr(args, name):
            setattr(args, name, value)
    config = read_options(TrainConfig, args)
    if config.lora_rank is not None and config.drafter is None:
        message = "--lora-rank updates a drafter that is trained: give it with --drafter D or --drafter current"
        raise ArgumentError(message)
    return config


def check(config: TrainConfig) -> None:
    """Check before loading anything that the inputs of a training exist and that its output can be written."""
    # One of several processes may lack a file that the others have. It fails later, where they learn of it.
    if launched_processes() == 1:
        check_paths(config)
    if config.dry_run or config.show_sample or config.watch:  # rounds replace the existing drafter
        return
    output = Path(str(config.output))
    check_output(output, config.overwrite)
    if not config.resume and not config.overwrite:
        check_no_checkpoints(output)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter train`. Returns its exit code."""

    def command() -> int:
        config = parse(argv)
        check(config)
        return int(import_libraries("redrafter.train.train_drafter").run_checked(config))

    return run_command(command)
