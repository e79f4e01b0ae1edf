"""The training loop, which trains a drafter on batches; the base is frozen.

`train` is the loop; `Trainer` implements its operations: an optimizer step, a validation, a checkpoint.
"""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from redrafter.cache.to_device import to_device
from redrafter.drafting.low_rank import LowRankDrafter
from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.errors import CheckpointError, first_line
from redrafter.model.teacher import Teacher
from redrafter.train.checkpoints import Checkpoint, Checkpoints
from redrafter.train.config import Log, TrainConfig
from redrafter.train.loss import Unroll, total_weight
from redrafter.train.optimizer import make_optimizer
from redrafter.train.processes import new_accelerator
from redrafter.train.progress import Clock, LossMeter, Progress, TrainingState

ASSUMED_STEPS = 1000  # of a training that only minutes limit, for the learning rate of its first step
MAX_GRAD_NORM = 1.0
_Group = list[tuple[Tensor, ...]]  # the batches of an optimizer step


def train(
    model: PreTrainedModel,
    drafter: TrainableDrafter,
    batches: Iterable[tuple[Tensor, ...]],
    config: TrainConfig,
    *,
    accelerator: Accelerator | None = None,
    validate: Callable[[], float | None] | None = None,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    log: Log = print,
    progress: Callable[[Progress], object] | None = None,
) -> TrainingState:
    """Train `drafter` in place until `config.steps`, `config.minutes` or the batches end.

    The host waits for the device only for progress, validations and checkpoints.

    Args:
        model: The base; moved to the accelerator's device.
        drafter: Float32 drafter to train.
        batches: Batches in the format of `Windows.batches`, on the CPU or on the device: token ids `[B, T]` int64; mask
            `[B, T]` bool, true on tokens that the base generates; and, for packed rows, the index of each token's text,
            `[B, T]`.
        config: Options of the training, those from `steps` on.
        accelerator: Accelerator of the processes that train together; created if None.
        validate: Measures the drafter's tokens per step; called every `config.validate_every` steps and at the end, on
            the main process, or on all processes if the base is sharded. Its time is excluded.
        checkpoints: Folder to write a checkpoint to every `config.save_every` steps.
        resumed: The checkpoint that `drafter` was loaded from; `batches` must continue from its step.
        log: Prints a line of progress after the first step and every `config.log_every` steps.
        progress: Called with the progress instead of `log`.

    Raises `NotFiniteLossError` if the loss of a step is not finite. Nothing is written after that step. After Ctrl-C,
    the processes of a training with `checkpoints` complete their step, write one, and raise `KeyboardInterrupt`.
    """
    accelerator = accelerator or new_accelerator(config)
    trainer = Trainer(model, drafter, config, accelerator, resumed)
    trainer.validate, trainer.checkpoints = validate, checkpoints
    show_progress = progress or (lambda numbers: log(str(numbers)))
    clock, meter = trainer.clock, trainer.meter
    first_step: float | None = 0.0  # seconds of the first step, until its line is shown
    last_shown = 0

    def save_due() -> bool:
        return bool(config.save_every and clock.step % config.save_every == 0)

    with trainer.teacher, _interrupts_noted(checkpoints is not None) as interrupted:
        for group in _groups(batches, config.accumulate):
            # Ask before the step, on every process: all must leave the loop at the same step, or collectives deadlock.
            fraction_done, ends = clock.agree(interrupted.is_set())
            if fraction_done >= 1:
                break
            if ends and first_step is None:  # at least one step was made
                if not save_due():
                    trainer.save()
                raise KeyboardInterrupt(f"step {clock.step} is saved; the same command with --resume continues")
            half_step = 0.5 / (clock.steps or ASSUMED_STEPS)
            trainer.step(group, config.peak_lr * learning_rate_factor(fraction_done, config.warmup, half_step))
            if first_step is not None:
                meter.check_finite()  # waits for the device: the first step compiles, so exclude it from the clock
                first_step = clock.seconds - clock.state.seconds
                clock.start()
            due = clock.step % config.log_every == 0
            # Always report the first step: the next due line may be minutes away.
            if due or first_step is not None:
                trainer.read_meter(reset=due)
                last_shown = clock.step
                numbers = trainer.progress(first_step)
                first_step = None
                if due:
                    accelerator.log(numbers.for_trackers(), step=clock.step)
                if accelerator.is_main_process:
                    show_progress(numbers)
            if config.validate_every and clock.step % config.validate_every == 0:
                trainer.run_validation()
            if save_due():
                trainer.save()
    trainer.read_meter()
    if last_shown != clock.step and accelerator.is_main_process:
        show_progress(trainer.progress())
    # The last step may have been validated already.
    if clock.step not in clock.state.tokens_per_step:
        trainer.run_validation()
    # The caller saves `drafter` itself, not the trained copy.
    trainer.merge()
    drafter.eval()
    return clock.state


@contextlib.contextmanager
def _interrupts_noted(noted: bool) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, instead of raising `KeyboardInterrupt`; the second one raises it."""
    interrupted = threading.Event()
    if not noted or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _groups(batches: Iterable[tuple[Tensor, ...]], size: int) -> Iterator[_Group]:
    """Group batches by optimizer step: `size` batches each, possibly fewer in the last group."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def learning_rate_factor(fraction_done: float, warmup: float, half_step: float = 0.0) -> float:
    """Return the learning rate relative to its peak: linear warmup, times a cosine decay to 0.

    Args:
        fraction_done: Completed fraction of the training, from 0 to 1.
        warmup: Fraction of the warmup.
        half_step: Half of the fraction that a step completes. The warmup counts to the middle of a step: at its start,
            the first step would have a rate of 0 and change nothing.
    """
    rise = min((fraction_done + half_step) / warmup, 1.0) if warmup else 1.0
    return rise * (1 + math.cos(math.pi * fraction_done)) / 2


class Trainer:
    """Base, drafter, optimizer and clock of a training; takes the arguments of `train`.

    With low-rank updates a copy of the drafter is trained, and `merge` copies the sum to `drafter`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: TrainableDrafter,
        config: TrainConfig,
        accelerator: Accelerator,
        resumed: Checkpoint | None,
    ):
        self.drafter, self.config, self.accelerator = drafter, config, accelerator
        self.validate: Callable[[], float | None] | None = None
        self.checkpoints: Checkpoints | None = None
        base: Any = model
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        self.teacher = Teacher(base.to(accelerator.device), drafter.config.target_layers_of(depth))
        self.meter = LossMeter(config.draft_len, accelerator)
        # Before the low-rank copy is made, so that it is in training mode too.
        drafter.train()
        self.low_rank = None if config.lora_rank is None else LowRankDrafter(drafter, config.lora_rank, config.seed)
        self.trained = drafter if self.low_rank is None else self.low_rank.drafter
        optimizer = make_optimizer(self.trained, config, accelerator.device)
        self.unroll, self.optimizer = accelerator.prepare(Unroll(self.trained, config), optimizer)
        if isinstance(self.unroll, DistributedDataParallel):
            # Otherwise it moves the mask to the device, where finding anchors makes the host wait.
            self.unroll.device_ids = None
        if resumed is not None:
            self._load(resumed)
        # Copy the state: the clock updates it, and `resumed` must still describe the checkpoint.
        self.clock = Clock(config, accelerator, None if resumed is None else deepcopy(resumed.state))
        self.tokens_before = self.clock.state.tokens  # tokens of the run before a resume

    def step(self, group: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        """Run one optimizer step on the mean loss over a group of batches of all processes."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate
        device = self.accelerator.device
        weight = to_device(sum((total_weight(mask, self.config) for _, mask, *_ in group), torch.zeros(())), device)
        # Dividing by the mean weight over processes turns the average of their summed losses into a mean over all
        # predictions. The clamp covers a step whose masks are all empty.
        mean_weight = self.accelerator.reduce(weight.clone(), "mean").clamp(min=1e-9)
        for index, (tokens, mask, *segment) in enumerate(group):
            tokens, *segment = (to_device(each, device) for each in (tokens, *segment))
            teacher_output = self.teacher.read_batch(tokens, *segment)
            last = index == len(group) - 1  # synchronise gradients only once per step
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.unroll):
                batch_loss = self.unroll(tokens, mask, teacher_output, *segment)
                self.accelerator.backward(batch_loss.loss / mean_weight)
            self.meter.add(self.clock.step, batch_loss)
        self.meter.add_weight(weight, sum(tokens.numel() for tokens, *_ in group))
        norm = self.accelerator.clip_grad_norm_(self.trained.parameters(), MAX_GRAD_NORM)
        if self.accelerator.scaler is None:  # a scaler skips steps with infinite gradients itself
            self.meter.expect_finite(self.clock.step, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Count the step only now, since `meter` identifies a failed step by the number before it.
        self.clock.state.step += 1

    def read_meter(self, *, reset: bool = True) -> None:
        """Wait for the device and update the state with `LossMeter.update_state`. Collective: call it on every rank."""
        self.meter.update_state(self.clock.state, reset=reset)
        self._note_time()

    def progress(self, first_step: float | None = None) -> Progress:
        """Return the progress at the last `read_meter`.

        `first_step` is the duration of this run's first step in seconds, if it has just ended.
        """
        clock, state = self.clock, self.clock.state
        seconds = clock.seconds if first_step is None else first_step
        # The first step's speed counts only this run's tokens and time.
        tokens = state.tokens - (0 if first_step is None else self.tokens_before)
        done = state.step, clock.steps, clock.fraction_done, clock.seconds
        rate, speed = self.optimizer.param_groups[0]["lr"], tokens / max(seconds, 1e-9)
        return Progress(*done, speed, state.loss, state.accuracy, rate, first_step)

    def merge(self) -> None:
        """Copy the sum of weights and low-rank updates, if any, to `drafter`."""
        if self.low_rank is not None:
            self.low_rank.merge()

    def run_validation(self) -> None:
        """Validate, and save the drafter if it is the best so far. Collective: call it on every rank."""
        if self.validate is None:
            return
        # A validation of broken weights would cost minutes before the error is reported.
        self.meter.check_finite()
        with self.clock.paused():
            self.merge()
            accelerator, state = self.accelerator, self.clock.state
            tokens_per_step = self.validate() if accelerator.is_main_process or self.config.shard_base else None
            if tokens_per_step is not None:
                accelerator.log({"tokens per step": tokens_per_step}, step=state.step)
                is_best = state.add_validation(tokens_per_step)
                # Without --validate-every the only validation is the last one, and the final drafter is saved anyway.
                keep = is_best and self.config.validate_every and accelerator.is_main_process
                if keep and self.checkpoints is not None:
                    self.checkpoints.save_best(self.drafter, state)
            # Other processes would run into the timeout of the next collective while the main one validates.
            self.accelerator.wait_for_everyone()

    def save(self) -> None:
        """Write a checkpoint. Collective: call it on every rank."""
        if self.checkpoints is None:
            return
        # A checkpoint after a failed step could not be resumed from.
        self.meter.check_finite()
        self._note_time()
        with self.clock.paused():
            accelerator, scaler = self.accelerator, self.accelerator.scaler
            # Collectives first, on every process; only the main process writes below.
            self.merge()
            if accelerator.is_main_process:
                state = self.optimizer.state_dict()
                optimizer = {"optimizer": state, "scaler": None if scaler is None else scaler.state_dict()}
                if self.low_rank is not None:
                    optimizer["low_rank"] = self.low_rank.state_dict()
                self.checkpoints.save(self.drafter, self.clock.state, optimizer)
            accelerator.wait_for_everyone()

    def _note_time(self) -> None:
        state = self.clock.state
        state.seconds, state.tokens = self.clock.seconds, self.tokens_before + self.meter.tokens

    def _load(self, resumed: Checkpoint) -> None:
        """Restore the optimizer. Raises `CheckpointError` for another training's state."""
        saved = resumed.load_optimizer()
        try:
            if self.low_rank is not None:
                self.low_rank.load_state_dict(saved["low_rank"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.accelerator.scaler is not None and saved["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(saved["scaler"])
        # torch raises many types for states of other shapes or versions.
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{resumed.path} is of another training: {first_line(error)}; delete it") from error
