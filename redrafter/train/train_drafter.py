"""Train a recurrent drafter for any Hugging Face causal LM. The base stays as it is.

    accelerate launch train/train_drafter.py --model BASE --data chat.jsonl --output drafter --mixed-precision bf16
    python train/train_drafter.py --model TINY --data text.jsonl --output drafter --length 128 --steps 200

`redrafter train` is the same. `train` is the loop, for programs with a model and batches of their own.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import flag, short_name
from redrafter.app.loading import limit_threads
from redrafter.app.program import run_command
from redrafter.checkpoints.drafters import check_fits_target, embedding_norms
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.data.documents import encode_documents, format_sample, sample_prompts
from redrafter.data.rows import Row, read_rows
from redrafter.data.windows import Windows
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.engine.stopping import end_tokens
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.target.target import Target
from redrafter.train.bad_rows import told
from redrafter.train.checkpoints import Checkpoint, Checkpoints, Identity
from redrafter.train.config import TrainConfig, parse
from redrafter.train.evaluate.replay import HeldOut, Walk
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import Report, train
from redrafter.train.model_card import model_card, shape, sizes
from redrafter.train.output import check_output, save
from redrafter.train.plan import last_step, plan, row_length
from redrafter.train.processes import launcher_refused, new_accelerator, stays_on_cpu
from redrafter.train.progress import Console, NotFiniteError
from redrafter.train.provenance import data_hash, provenance
from redrafter.train.sharded_base import load_sharded
from redrafter.train.trackers import start_trackers, tracking

__all__ = ["Report", "TrainConfig", "main", "new_drafter", "train"]

VALIDATE_SHARE, VALIDATE_TOKENS = 0.5, 64  # of a held-out text: the share that is a prompt, and its most tokens
OWN = ("num_layers", "exit_dim", "rnn", "recurrence", "target_layers", "head_rank", "draft_vocab_size")


def run(config: TrainConfig, log: Callable[[str], object]) -> None:
    """Everything from the files of a command line to a directory that `RecurrentDrafter.from_pretrained` opens."""
    tokenizer = load_tokenizer(str(config.model), trust_remote_code=config.trust_remote_code)
    if config.show_sample:
        first = next(encode_documents(_rows(config), tokenizer), None)
        if first is None:
            raise _nothing(config)
        log(format_sample(first, tokenizer))
        return
    config = replace(config, length=row_length(config))
    if config.dry_run:
        processes = PartialState(cpu=stays_on_cpu(config)).num_processes
        log("\n".join(plan(config, _windows(config, tokenizer), processes)))
        return
    check_output(Path(str(config.output)), config.overwrite)
    accelerator = new_accelerator(config, **tracking(config))
    limit_threads(accelerator.device.type)
    main = accelerator.is_main_process
    with Console(log if main else lambda _: None, shown=None if main else False) as console:
        session = _Session(config, accelerator, tokenizer, console)
        start_trackers(config, accelerator)
        report = session.train()
        if main or config.shard_base:
            session.finish(report)
    accelerator.wait_for_everyone()
    accelerator.end_training()


class _Session:
    """One run of the command. held_out: None in a process that does not validate."""

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, console: Console
    ):
        self.config, self.accelerator, self.tokenizer, self.console = config, accelerator, tokenizer, console
        self.windows = _windows(config, tokenizer)
        self.target = _target(config, accelerator)  # refuses a base that could not be served
        self.windows.check(self.target.vocab_size, self.target.fixed_rope_context)
        self.base = short_name(self.target.model.config._name_or_path)
        self.checkpoints, self.resumed = self._checkpoints()
        self.drafter = self._drafter()
        console.say(
            f"base {self.target.name}, frozen; drafter of {sizes(self.target.model, self.drafter)}, trained; "
            f"{len(self.windows):,} windows"
        )
        if self.resumed is not None:
            console.say(f"going on from step {self.resumed.standing.step}")
        self.held_out = self._held_out() if accelerator.is_main_process or config.shard_base else None
        self.walk: Walk | None = None

    def train(self) -> Report:
        config, accelerator = self.config, self.accelerator
        steps = last_step(config, self.windows, accelerator.num_processes)
        done = 0 if self.resumed is None else self.resumed.standing.step
        batches = self.windows.batches(*self._order(done, accelerator.process_index))
        try:
            return train(
                self.target.model,
                self.drafter,
                (batch if config.pack else batch[:2] for batch in batches),
                replace(config, steps=steps),
                accelerator=accelerator,
                validate=self.validate,
                checkpoints=self.checkpoints,
                resumed=self.resumed,
                progress=self.console.show,
            )
        except NotFiniteError as error:
            held_by_batch = self.windows.window_indices(*self._order(error.step, error.process))
            held = chain.from_iterable(islice(held_by_batch, config.accumulate))
            raise NotFiniteError(error.step, error.process, told(held, self.windows, self.tokenizer)) from None

    def validate(self) -> float | None:
        """Tokens per step; None where there is nothing to validate on."""
        if self.held_out is None or not self.held_out.count:
            return None
        self.walk = self.held_out.walk(self.drafter, shape(self.drafter))
        self.console.say(
            f"walked {self.walk.tokens_per_step:.3f} tokens per step over {self.held_out.count} held-out prompts"
        )
        return self.walk.tokens_per_step

    def finish(self, report: Report) -> None:
        """Save the best drafter, with what is known of it."""
        config, drafter, output = self.config, self.drafter, Path(str(self.config.output))
        if report.best_step not in (None, report.steps):
            best = Checkpoint.read(self.checkpoints.best)
            # Killed and gone on with, on a device that does not repeat itself, another may have been kept.
            report = replace(report, best_step=best.standing.best_step)
            drafter.load_state_dict(best.drafter().state_dict())
            self.console.say(f"step {report.best_step} was the best of {len(report.walked)} validations")
            self.validate()
        if not self.accelerator.is_main_process:
            return
        model, held_out = self.target.model, self.held_out
        facts = provenance(model, self.base, config, report, self.windows, self.accelerator)
        card = model_card(model, drafter, config, report, self.walk, held_out.count if held_out else 0, facts)
        save(drafter, output, card, facts, getattr(torch, config.save_dtype), config.overwrite)
        self.console.say(f"saved {output}, the drafter of step {facts['saved_step']}")

    def _order(self, step: int, process: int) -> tuple[int, int, int, int, int]:
        """What `Windows.batches` needs to know, from an optimizer step on."""
        config = self.config
        return config.batch_size, config.seed, process, self.accelerator.num_processes, step * config.accumulate

    def _checkpoints(self) -> tuple[Checkpoints, Checkpoint | None]:
        """Where checkpoints go, and the one to go on from."""
        config, accelerator = self.config, self.accelerator
        identity = Identity.of(config, self.base, data_hash(self.windows), accelerator.num_processes)
        checkpoints = Checkpoints(Path(str(config.output)), config.keep, identity)
        if accelerator.is_main_process:
            checkpoints.tidy()
        accelerator.wait_for_everyone()
        if not config.resume and not config.overwrite and checkpoints.folder.exists():
            raise ArgumentError(
                f"{checkpoints.folder} holds an earlier training's checkpoints; go on with --resume, or begin anew "
                "with --overwrite"
            )
        resumed = checkpoints.newest() if config.resume else None
        accelerator.wait_for_everyone()
        if resumed is None and accelerator.is_main_process:
            checkpoints.drop()
        return checkpoints, resumed

    def _drafter(self) -> RecurrentDrafter:
        """A new drafter, or the one to go on with; its config says what it is being trained for."""
        config, target = self.config, self.target
        if config.drafter is not None:
            for name in OWN:
                if getattr(config, name) != getattr(TrainConfig, name):
                    raise ArgumentError(f"{flag(name)} is the drafter's own: leave it out with --drafter")
        if self.resumed is not None or config.drafter is not None:
            place = self.resumed.path if self.resumed is not None else config.drafter
            drafter: RecurrentDrafter = RecurrentDrafter.from_pretrained(place, dtype=torch.float32)
            check_fits_target(drafter, target)
        else:
            drafter = new_drafter(target.model, config, self._draft_ids())
        drafter.config.base_model = self.base
        drafter.config.base_embedding_norms = embedding_norms(target.embedding)
        drafter.config.trained_draft_len = config.draft_len
        return drafter

    def _draft_ids(self) -> Tensor | None:
        """The most frequent ids of the data, if not all are wanted."""
        size = self.config.draft_vocab_size
        if size is None:
            return None
        if size > self.target.vocab_size:
            raise ArgumentError(f"--draft-vocab-size {size} is more than the base's {self.target.vocab_size} ids")
        return self.windows.count_ids(self.target.vocab_size).topk(size).indices.sort().values

    def _held_out(self) -> HeldOut:
        """Held-out prompts as the base itself writes on from them, greedily."""
        config, context = self.config, self.target.fixed_rope_context
        rows = read_rows([config.validate] if config.validate else config.data)
        chosen = (row for row in rows if row.split == "val" or (config.validate and row.split != "train"))
        length = row_length(config)
        room = length if context is None else min(length, context - 1)
        begun = sample_prompts(
            chosen,
            self.tokenizer,
            config.validate_prompts,
            room,
            config.seed,
            text_share=VALIDATE_SHARE,
            max_text_tokens=VALIDATE_TOKENS,
        )
        if not begun and (config.validate or config.validate_every):
            raise ArgumentError(
                f"{config.validate or ', '.join(config.data)}: no prompt of 1 to {room} tokens to validate on; give "
                "--validate other rows and --validate-prompts more than 0, or leave these and --validate-every out"
            )
        return HeldOut(self.target, begun, config.validate_tokens, end_tokens(self.target.model, self.tokenizer))


def _rows(config: TrainConfig) -> Iterator[Row]:
    return (row for row in read_rows(config.data) if row.split in (None, "train"))


def _windows(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    windows = Windows(
        encode_documents(_rows(config), tokenizer), row_length(config), tokenizer.bos_token_id, config.pack
    )
    if not len(windows):
        raise _nothing(config)
    return windows


def _nothing(config: TrainConfig) -> CheckpointError:
    return CheckpointError(f"{', '.join(config.data)}: no row to train on; rows of split val and test are not")


def _target(config: TrainConfig, accelerator: Accelerator) -> Target:
    load: dict[str, Any] = {"dtype": config.dtype, "trust_remote_code": config.trust_remote_code}
    if not config.shard_base:
        return Target(load_model(str(config.model), device=accelerator.device, **load))
    model = load_sharded(lambda: load_model(str(config.model), device="cpu", **load), accelerator)
    target = Target(model, type(model).__name__.removeprefix("FSDP"))  # which sharding puts before a model's class
    target.refuse_varlen("its layers are spread over several processes")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""

    def command() -> int:
        config = parse(argv)
        if launcher_refused():
            return 2
        run(config, log=lambda line: print(line, flush=True))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
