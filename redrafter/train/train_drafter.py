"""Train a drafter for any Hugging Face causal LM, with a frozen base.

    accelerate launch train/train_drafter.py --model BASE --data chat.jsonl --output drafter --mixed-precision bf16
    python train/train_drafter.py --model TINY --data text.jsonl --output drafter --length 128 --steps 200

`redrafter train` is equivalent. Programs with their own model and batches call `train`, the training loop.
"""

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.loading import limit_threads
from redrafter.app.templates import load_chat_tokenizer
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.checkpoints.drafters import check_fits_target, embedding_norms
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.rows import open_lines
from redrafter.data.windows import Windows
from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER
from redrafter.formats.model_card import upload_command
from redrafter.measure.replay import ReplayStats, ValidationTexts
from redrafter.model.target import Target
from redrafter.parallel.launched import launched_processes
from redrafter.train import plan
from redrafter.train.checkpoints import Checkpoint, Checkpoints, TrainingIdentity, check_same_start, load_drafter
from redrafter.train.config import Log, TrainConfig, main
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.optimizer import check_optimizer
from redrafter.train.output import (
    choose_tree,
    describe_size,
    hash_windows,
    make_model_card,
    make_provenance,
    save_drafter,
    served_shape,
)
from redrafter.train.processes import broadcast_weights, load_sharded, new_accelerator, stays_on_cpu
from redrafter.train.progress import TrainingState

# Explains `right` in lines of progress.
RIGHT = (
    "right 0.5 0.4 ...: the drafter's best guess was the text's own token at draft step 1 in 0.5 of all cases, and at "
    "step 2 in 0.4 of those where step 1 was right"
)
__all__ = ["TrainConfig", "main", "new_drafter", "train"]

CURRENT = "current"  # value of --drafter for the existing one
REPLAYED_ROWS = 2048  # of earlier files, newest first, that a round trains on again
POLL_SECONDS = 2.0  # between scans of directories without enough new rows


def current_drafter(config: TrainConfig) -> str:
    """Return the directory of the drafter in `--output`, or else in the base's directory.

    Raises:
        ArgumentError: Neither directory has a drafter.
    """
    for folder in (Path(str(config.output)), Path(str(config.model)) / DRAFTER_FOLDER):
        if (folder / "config.json").is_file():
            return str(folder)
    raise ArgumentError(
        f"--drafter {CURRENT} is the drafter that --output {config.output} holds, or the one in {config.model}, and "
        "there is none: name its directory"
    )


def watch(config: TrainConfig, run: Callable[[TrainConfig], object], log: Log) -> None:
    """Train in rounds until the process is stopped, each starting from the previous round's drafter.

    Args:
        config: Options of the training; `data` are directories, whose .jsonl files must appear atomically.
        run: Trains and saves one round.
        log: Called with a line about each round before it starts.

    Raises:
        ArgumentError: The options are incompatible.
    """
    folders = [Path(source) for source in config.data]
    if wrong := [folder for folder in folders if not folder.is_dir()]:
        message = f"--watch looks for new files in directories, and {wrong[0]} is none: make it, or leave it out"
        raise ArgumentError(message)
    if config.drafter is None:
        raise ArgumentError(f"--watch trains a drafter further: give it with --drafter D, or --drafter {CURRENT}")
    for name in ("resume", "dry_run", "show_sample"):
        if vars(config)[name]:
            raise ArgumentError(f"--{name.replace('_', '-')} is for one training: leave out --watch")
    if launched_processes() > 1:
        message = "--watch trains in one process, as processes could find other files: start it without a launcher"
        raise ArgumentError(message)
    # Numbers of rows of files that were trained on, and of files for the next round.
    seen, waiting = dict[Path, int](), dict[Path, int]()
    number = 0
    while True:
        for folder in folders:
            # Names of captured files sort by time, so rounds train on them in order.
            for file in sorted(folder.glob("*.jsonl")):
                if file not in seen and file not in waiting:
                    waiting[file] = _count_rows(file)
        waiting = {file: rows for file, rows in waiting.items() if file.is_file()}  # a server drops the oldest files
        if sum(waiting.values()) < config.watch_rows:
            time.sleep(POLL_SECONDS)
            continue
        number += 1
        # Training on a few new rows alone forgets earlier ones, so repeat the newest earlier rows.
        again, left = list[Path](), REPLAYED_ROWS
        for file in reversed([file for file in seen if file.is_file()]):
            if seen[file] > left:
                break
            again.insert(0, file)
            left -= seen[file]
        earlier = f", and {sum(seen[file] for file in again):,} of {len(again)} earlier ones" if again else ""
        log(f"round {number}: {sum(waiting.values()):,} rows of {len(waiting)} new files{earlier}")
        run(replace(config, data=tuple(map(str, [*again, *waiting])), overwrite=True))
        seen, waiting = seen | waiting, {}
        # The first round starts from --drafter, later rounds from the drafter that was just saved.
        config = replace(config, drafter=config.output)


def _count_rows(file: Path) -> int:
    try:
        return sum(1 for _ in open_lines(file))
    except CheckpointError:
        return 0  # it was just dropped, or is invalid, which training will report


def train_from_files(config: TrainConfig, log: Log) -> None:
    """Train a drafter on the files of a command line, and save it."""
    check_optimizer(config)  # before the base is loaded
    tokenizer = load_chat_tokenizer(str(config.model), config, trust_remote_code=config.trust_remote_code)
    if config.show_sample:
        log(plan.show_first_document(config, tokenizer))
        return
    config = plan.resolve_options(config)
    if config.dry_run:
        processes, windows = PartialState(cpu=stays_on_cpu(config)), plan.load_windows(config, tokenizer)
        log("\n".join(plan.describe_plan(config, windows, processes.num_processes)))
        return
    accelerator = new_accelerator(config)
    limit_threads(accelerator.device.type)
    main = accelerator.is_main_process
    session = TrainingSession(config, accelerator, tokenizer, log if main else lambda _: None)
    result = session.train()
    # With a sharded base every process takes part in its forwards, also when choosing the tree.
    if main or config.shard_base:
        session.finish(result)
    accelerator.wait_for_everyone()
    accelerator.end_training()


class TrainingSession:
    """A run of `redrafter train`, which loads base, data and drafter, trains, validates and saves."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, log: Log):
        self.config, self.accelerator, self.log = config, accelerator, log
        self.windows = plan.load_windows(config, tokenizer)
        self.target = _target(config, accelerator)  # raises an error for a base that cannot be served
        # After the base is loaded, since only then the context of its rotary embedding is known.
        self.windows.check(self.target.vocab_size, self.target.fixed_rope_context)
        self.base = short_name(self.target.model.config.name_or_path)
        self.checkpoints, self.resumed = self._open_checkpoints()
        # The number that started the training; a resumed run may use another.
        self.processes = self.checkpoints.identity.processes
        self.accumulate = config.accumulate * self.processes // accelerator.num_processes  # batches of a step on each
        self.drafter = self._load_drafter()
        trained = plan.trained_parameters(self.drafter, config)
        what = "trained" if config.lora_rank is None else f"{trained:,} of rank {config.lora_rank} trained"
        log(
            f"base {self.target.name}, frozen; drafter of {describe_size(self.target.model, self.drafter)}, {what}; "
            f"{len(self.windows):,} windows"
        )
        model, steps = self.target.model, plan.last_step(config, self.windows, self.processes)
        notes = plan.notes(config, model, self.drafter, self.windows, steps)
        for line in [*plan.describe_recipe(config, model, self.drafter), *notes]:
            log(line)
        if self.resumed is not None:
            log(f"resuming from step {self.resumed.state.step}")
        validates = accelerator.is_main_process or config.shard_base
        self.validation_texts: ValidationTexts | None = None  # None in a process that does not validate
        # The user says which rows are held out: in a file of their own, some may be trained on too.
        self.validation_kind = f"prompts of {short_name(config.validate)}" if config.validate else "held-out prompts"
        if validates:  # let the base continue the prompts greedily
            prompts = plan.validation_prompts(config, tokenizer, self.target.fixed_rope_context)
            if config.validate_prompts and not prompts:
                log(
                    "note: there are no rows to validate on, so the drafter is not measured, and the tree that it "
                    'drafts is not chosen: give --validate FILE, or rows with "split": "val"'
                )
            ends = end_tokens(self.target.model, tokenizer)
            self.validation_texts = ValidationTexts(self.target, prompts, config.validate_tokens, ends)

    def train(self) -> TrainingState:
        """Run the training loop."""
        config, accelerator = self.config, self.accelerator
        steps = plan.last_step(config, self.windows, self.processes)
        done = 0 if self.resumed is None else self.resumed.state.step
        self.log(RIGHT)
        processes, first = accelerator.num_processes, done * self.accumulate
        place = accelerator.process_index, processes, first, self.processes
        every = self.windows.batches(config.batch_size, config.seed, *place)
        batches = (batch if config.pack else batch[:2] for batch in every)
        config = replace(config, steps=steps, accumulate=self.accumulate)
        return train(
            self.target.model,
            self.drafter,
            batches,
            config,
            accelerator=accelerator,
            validate=self.validate,
            checkpoints=self.checkpoints,
            resumed=self.resumed,
            log=self.log,
        )

    def validate(self) -> float | None:
        """Return the drafter's tokens per step on the greedy validation texts; None if there are none."""
        texts = self.validation_texts
        if texts is None or not texts.count:
            return None
        shape = served_shape(self.drafter)
        greedy, sampled = (texts.measure(self.drafter, shape, x).tokens_per_step for x in (None, self.config.seed))
        self.log(
            f"walked {greedy:.3f} tokens per step greedily and {sampled:.3f} at T=1 over {texts.count} "
            f"{self.validation_kind}"
        )
        return greedy

    def finish(self, result: TrainingState) -> None:
        """Save the drafter with the best validation, its model card and its record."""
        config, drafter, output = self.config, self.drafter, Path(str(self.config.output))
        if result.best_step not in (None, result.step):
            if self.accelerator.is_main_process:  # the machine that wrote it
                best = Checkpoint.load(self.checkpoints.best)
                # After a kill and resume on a nondeterministic device, the saved one may be of another step.
                result = replace(result, best_step=best.state.best_step)
                drafter.load_state_dict(load_drafter(best.path).state_dict())
            if config.shard_base:  # all processes choose the tree below, so all need these weights
                broadcast_weights(drafter, self.accelerator)
            self.log(f"step {result.best_step} was the best of {len(result.tokens_per_step)} validations")
        texts = self.validation_texts
        measured: dict[str, ReplayStats] = {}
        if texts is not None and texts.count:
            measured, line = choose_tree(drafter, texts, config.draft_len, config.seed)
            self.log(line)
        if not self.accelerator.is_main_process:
            return
        model = self.target.model
        facts = make_provenance(model, self.base, config, result, self.windows, self.accelerator)
        prompts = f"{texts.count if texts else 0} {self.validation_kind}"
        card = make_model_card(model, drafter, config, result, measured, prompts, facts)
        save_drafter(drafter, output, card, facts, getattr(torch, config.save_dtype), config.overwrite)
        self.log(f"saved {output}, the drafter of step {facts['saved_step']}")
        pair = ["redrafter", "generate", "--model", str(config.model), "--drafter", str(output)]
        self.log(f"to try it: {shlex.join(pair)} --compare 'Once upon a time'")
        self.log(f"to share it on the Hub: {upload_command(drafter.config, str(output))}")

    def _open_checkpoints(self) -> tuple[Checkpoints, Checkpoint | None]:
        """Open the folder of checkpoints, and the checkpoint to resume. Collective: call it on every rank."""
        config, accelerator = self.config, self.accelerator
        # Hash the windows rather than the files: renamed files with equal rows resume.
        data = hash_windows(self.windows)
        identity = TrainingIdentity.from_config(config, self.base, data, accelerator.num_processes)
        checkpoints = Checkpoints(Path(str(config.output)), identity)
        if accelerator.is_main_process:
            checkpoints.remove_partial()
        accelerator.wait_for_everyone()
        resumed = checkpoints.newest() if config.resume else None
        # Before any process removes or writes checkpoints.
        check_same_start(accelerator, checkpoints, resumed)
        if resumed is not None:
            checkpoints.identity = replace(identity, processes=resumed.identity.processes)
        # All must have read the checkpoints before the main process removes any.
        accelerator.wait_for_everyone()
        if resumed is None and accelerator.is_main_process:
            checkpoints.remove_all()
        return checkpoints, resumed

    def _load_drafter(self) -> TrainableDrafter:
        """Create a new drafter or load an existing one, and record base and draft length in its config."""
        config, target = self.config, self.target
        if self.resumed is not None or config.drafter is not None:
            drafter = load_drafter(self.resumed.path if self.resumed is not None else str(config.drafter))
            check_fits_target(drafter, target)
            drafter.check_unroll(config.draft_len)
        else:
            ids = frequent_ids(config.draft_vocab_size, self.windows, target.vocab_size)
            drafter = new_drafter(target.model, config, ids)
        # Recorded so that loading can refuse another base.
        drafter.config.base_model = self.base
        drafter.config.base_embedding_norms = embedding_norms(target.embedding.weight)
        drafter.config.trained_draft_len = config.draft_len
        return drafter


def frequent_ids(size: int | None, windows: Windows, vocab_size: int) -> Tensor | None:
    """Return the `size` most frequent ids of the data, `[V']` int64; None, where `size` is None, for all."""
    if size is None:
        return None
    if size > vocab_size:
        raise ArgumentError(f"--draft-vocab-size {size} is more than the base's {vocab_size} ids")
    return windows.count_ids(vocab_size).topk(size).indices.sort().values


def _target(config: TrainConfig, accelerator: Accelerator) -> Target:
    """Load the base with its adapter, sharded over the processes with `--shard-base`."""
    load: dict[str, Any] = {"dtype": config.dtype, "trust_remote_code": config.trust_remote_code}

    def load_base(device: Any) -> PreTrainedModel:
        model = load_model(str(config.model), device=device, **load)
        if config.adapter is not None:
            merge_adapter(model, config.adapter)
        return model

    if not config.shard_base:
        return Target(load_base(accelerator.device))
    model = load_sharded(lambda: load_base("cpu"), accelerator)
    return Target(model, type(model).__name__.removeprefix("FSDP"))  # FSDP adds this prefix to the class name


def run_checked(config: TrainConfig) -> int:
    """Run the command with options validated by `main`. Returns its exit code."""

    def log(line: str) -> None:
        print(line, flush=True)

    if config.drafter == CURRENT:
        config = replace(config, drafter=current_drafter(config))
    if config.watch:
        watch(config, lambda of_round: train_from_files(of_round, log), log)
    train_from_files(config, log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
