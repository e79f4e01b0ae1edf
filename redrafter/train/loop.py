"""The loop: batches in, a trained drafter out. The base stays as it is."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import CheckpointError, first_line
from redrafter.train.checkpoints import Checkpoint, Checkpoints, machine_state, set_machine_state
from redrafter.train.config import TrainConfig
from redrafter.train.loss import Unroll, weight
from redrafter.train.optimizer import make_optimizer, schedule
from redrafter.train.processes import new_accelerator
from redrafter.train.progress import Clock, Meter, Numbers
from redrafter.train.teacher import Teacher

__all__ = ["Report", "train"]


@dataclass(frozen=True)
class Report:
    """What a training did. tokens: that were read, padding included. loss, accuracy: of the last lines of progress;
    accuracy[k] is of step k + 1, among rollouts whose earlier steps were all right. walked: what validation found, by
    step; best_step: of the best of them. spent: seconds beside the training's own `seconds`, and those of them in which
    the host waited for batches."""

    steps: int
    tokens: int
    seconds: float
    loss: float
    accuracy: list[float]
    walked: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None
    spent: dict[str, float] = field(default_factory=dict)


def train(
    model: PreTrainedModel,
    drafter: RecurrentDrafter,
    batches: Iterable[tuple[Tensor, ...]],
    config: TrainConfig,
    *,
    accelerator: Accelerator | None = None,
    validate: Callable[[], float | None] | None = None,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    log: Callable[[str], object] = print,
    progress: Callable[[Numbers], object] | None = None,
) -> Report:
    """Train `drafter` in place, for `config.steps`, for `config.minutes`, or as long as there are batches.

    model: the base; it is moved to the accelerator's device. batches: as `Windows.batches` gives them: token ids
    `[B, T]` int64, mask `[B, T]` bool, true on the tokens that the base itself is to write, and, where a row holds
    several texts, their numbers `[B, T]`; on the host, or on the device already. validate: tokens per step, asked every
    `config.validate_every` steps and at the end on the main process, or on all of them where they share the base; its
    time is not counted. checkpoints: written every `config.save_every` steps; resumed: the one that `drafter` was
    loaded from, where `batches` go on. progress: told the numbers every `config.log_every` steps, instead of `log`.

    Apart from that the host never waits for the device. Raises `NotFiniteError` naming the step whose loss was not
    finite, before anything is written after it.
    """
    accelerator = accelerator or new_accelerator(config)
    trainer = _Trainer(model, drafter, config, accelerator, resumed)
    trainer.validate, trainer.checkpoints = validate, checkpoints
    tell = progress or (lambda numbers: log(str(numbers)))
    clock, meter = trainer.clock, trainer.meter
    with trainer.teacher:
        for group in trainer.waited(_groups(batches, config.accumulate)):
            done = clock.agreed()
            if done >= 1:
                break
            trainer.step(group, config.lr * schedule(done, config.warmup))
            if trainer.first:
                meter.verify()  # waits: the first step compiles, and is not to be counted
                clock.start()
                trainer.first = False
            if clock.step % config.log_every == 0:
                trainer.read()
                numbers = trainer.numbers()
                accelerator.log(numbers.logged(), step=clock.step)
                if accelerator.is_main_process:
                    tell(numbers)
            if config.validate_every and clock.step % config.validate_every == 0:
                trainer.judge()
            if config.save_every and clock.step % config.save_every == 0:
                trainer.save()
    trainer.read()
    if clock.step not in clock.at.walked:
        trainer.judge()
    drafter.eval()
    at = clock.at
    return Report(at.step, at.tokens, at.seconds, meter.loss, meter.accuracy, at.walked, at.best_step, clock.spent)


class _Trainer:
    """What a training is made of. first: whether no step was made yet by this process. read_before: tokens that were
    read before it."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: RecurrentDrafter,
        config: TrainConfig,
        accelerator: Accelerator,
        resumed: Checkpoint | None,
    ):
        self.drafter, self.config, self.accelerator, self.first = drafter, config, accelerator, True
        self.validate: Callable[[], float | None] | None = None
        self.checkpoints: Checkpoints | None = None
        placed: Any = model
        self.teacher = Teacher(placed.to(accelerator.device), drafter.config.target_layers)
        self.meter = Meter(config.draft_len, accelerator)
        unroll = Unroll(drafter.train(), config)
        self.unroll, self.optimizer = accelerator.prepare(unroll, make_optimizer(drafter, config, accelerator.device))
        if isinstance(self.unroll, DistributedDataParallel):
            # Else it moves the mask to the device, where the positions that count cannot be found without waiting.
            self.unroll.device_ids = None
        if resumed is not None:
            self._load(resumed)
        self.clock = Clock(config, accelerator, None if resumed is None else deepcopy(resumed.standing))
        self.read_before = self.clock.at.tokens

    def step(self, group: Sequence[Sequence[Tensor]], rate: float) -> None:
        """One optimizer step over some batches. The mean is over all of them, of all processes. rate: of learning."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        own = sum((weight(mask, self.config) for _, mask, *_ in group), torch.zeros(()))
        own = self._placed(own)
        # Gradients are averaged over the processes.
        total = self.accelerator.reduce(own.clone(), "mean").clamp(min=1e-9)
        for index, (tokens, mask, *segment) in enumerate(group):
            tokens = self._placed(tokens)
            reading = self.teacher.read(tokens, *map(self._placed, segment))
            last = index == len(group) - 1  # where processes meet
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.unroll):
                losses = self.unroll(tokens, mask, reading)
                self.accelerator.backward(losses.loss / total)
            self.meter.add(self.clock.step, losses)
        self.meter.weigh(own, sum(tokens.numel() for tokens, *_ in group))
        norm = self.accelerator.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm)
        if self.accelerator.scaler is None:  # which steps over such gradients
            self.meter.check(self.clock.step, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.at.step += 1

    def waited(self, groups: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """The same, the time taken."""
        while True:
            with self.clock.noted("waiting for data"):
                group = next(groups, None)
            if group is None:
                return
            yield group

    def read(self) -> None:
        """Wait for the device and read the meter."""
        self.meter.read()
        self._note()
        self.clock.at.accuracy = self.meter.accuracy
        self.clock.at.loss = self.meter.loss if math.isfinite(self.meter.loss) else None

    def numbers(self) -> Numbers:
        clock, meter = self.clock, self.meter
        speed, rate = clock.at.tokens / max(clock.seconds, 1e-9), self.optimizer.param_groups[0]["lr"]
        return Numbers(clock.step, clock.steps, clock.part, clock.seconds, speed, meter.loss, meter.accuracy, rate)

    def judge(self) -> None:
        """Validate, and keep the drafter if it is the best so far."""
        if self.validate is None:
            return
        self.meter.verify()
        with self.clock.noted("validating", stopped=True):
            accelerator, at = self.accelerator, self.clock.at
            found = self.validate() if accelerator.is_main_process or self.config.shard_base else None
            if found is not None:
                accelerator.log({"tokens per step": found}, step=at.step)
                kept = at.judge(found) and self.config.validate_every and accelerator.is_main_process
                if kept and self.checkpoints is not None:
                    self.checkpoints.save_best(self.drafter, at)
            self.accelerator.wait_for_everyone()

    def save(self) -> None:
        if self.checkpoints is None:
            return
        self.meter.verify()
        self._note()
        with self.clock.noted("saving", stopped=True):
            machines = machine_state(self.accelerator)
            if self.accelerator.is_main_process:
                scaler = self.accelerator.scaler
                state = {
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                }
                self.checkpoints.save(self.drafter, self.clock.at, state, machines)
            self.accelerator.wait_for_everyone()

    def _note(self) -> None:
        at = self.clock.at
        at.seconds, at.tokens = self.clock.seconds, self.read_before + self.meter.tokens

    def _load(self, resumed: Checkpoint) -> None:
        state, machines = resumed.state()
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            set_machine_state(self.accelerator, machines)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{resumed.path} is of another training: {first_line(error)}; delete it") from error
        at = resumed.standing
        self.meter.loss, self.meter.accuracy = at.loss if at.loss is not None else math.nan, list(at.accuracy)

    def _placed(self, tensor: Tensor) -> Tensor:
        """On the device, without the host waiting for it."""
        device = self.accelerator.device
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)


def _groups(batches: Iterable[tuple[Tensor, ...]], size: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """What each optimizer step reads: `size` batches, at the end perhaps fewer."""
    each = iter(batches)
    while group := list(islice(each, size)):
        yield group
