"""Measure progress of a training: steps, time, loss and accuracy, without waiting for the device at every step."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch import distributed as dist

from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig
from redrafter.train.loss import BatchLoss


class NotFiniteLossError(ArgumentError):
    """A loss or a gradient is infinite or not a number."""


@dataclass
class TrainingState:
    """The progress of a training run, as checkpoints save it."""

    step: int = 0  # completed optimizer steps
    tokens: int = 0  # processed tokens, including padding
    seconds: float = 0.0  # time spent training, without validations, checkpoints and the first step
    loss: float = math.nan  # mean loss over the last interval of progress
    # Entry k is the accuracy of draft step k + 1 over rollouts with correct earlier steps, in the last interval.
    accuracy: list[float] = field(default_factory=list)
    tokens_per_step: dict[int, float] = field(default_factory=dict)  # result of each validation, by optimizer step
    best_step: int | None = None  # optimizer step of the best validation; None without validations

    def add_validation(self, tokens_per_step: float) -> bool:
        """Record the result of a validation at this step. Returns whether it is the best so far."""
        self.tokens_per_step[self.step] = tokens_per_step
        is_best = self.best_step is None or tokens_per_step >= self.tokens_per_step[self.best_step]
        self.best_step = self.step if is_best else self.best_step
        return is_best

    def to_json(self) -> dict[str, object]:
        """Return the state as entries of trainer.json."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "TrainingState":
        """Parse the result of `to_json`. If invalid, raises `KeyError`, `TypeError`, `ValueError`, `AttributeError`."""
        state = cls(**document)
        state.loss = math.nan if state.loss is None else state.loss
        state.tokens_per_step = {int(step): value for step, value in state.tokens_per_step.items()}
        return state


@dataclass(frozen=True)
class Progress:
    """The numbers of a progress line."""

    step: int  # completed optimizer steps
    steps: int | None  # optimizer steps of the whole training; None if only time ends it
    fraction_done: float  # completed fraction of the training, from 0 to 1
    seconds: float  # time spent training
    speed: float  # tokens read per second
    loss: float  # mean loss since the last line
    accuracy: list[float]  # accuracy by draft step since the last line, as in `TrainingState`
    learning_rate: float  # learning rate of the last step
    first_step: float | None = None  # seconds of this run's first step, in its line only; excluded from `seconds`

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end; None before the first step."""
        if self.fraction_done > 0 and self.seconds > 0:
            return self.seconds * (1 - self.fraction_done) / self.fraction_done
        return None

    def __str__(self) -> str:
        whole = f"/{self.steps}" if self.steps else ""
        time = _format_time(self.seconds)
        if self.seconds_left is not None:
            time += f", {_format_time(max(self.seconds_left, 0))} left"
        if self.first_step is not None:
            time = f"{_format_time(self.first_step)} for the first step"
        right = " ".join(f"{share:.3f}" for share in self.accuracy)
        return (
            f"step {self.step}{whole}  {time}  {self.speed:,.0f} tokens/s  "
            f"loss {self.loss:.4f}  right {right}  lr {self.learning_rate:.1e}"
        )

    def for_trackers(self) -> dict[str, float]:
        """Return the numbers by their names in trackers."""
        depths = {f"accuracy/draft_{depth}": share for depth, share in enumerate(self.accuracy, start=1)}
        return {"loss": self.loss, "lr": self.learning_rate, "tokens/s": self.speed} | depths


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Clock:
    """Counts the steps and the time of a training, without its validations and checkpoints.

    `state` is the one to continue from; a new one when None. Collective: make one on every rank.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, state: TrainingState | None = None):
        self.steps, self.minutes, self.accelerator = config.steps, config.minutes, accelerator
        self.state = state or TrainingState()
        # On hosts: a broadcast by GPUs would make each host wait for its GPU before every step.
        self._host_group: Any = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._seconds_before = self.state.seconds
        self.start()

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.state.step

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including those before a resume."""
        return self._seconds_before + time.perf_counter() - self._started

    def start(self) -> None:
        """Start measuring time."""
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the duration of the block from `seconds`."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    @property
    def fraction_done(self) -> float:
        """Completed fraction of the training by this process's clock; 1 or more at the end."""
        by_steps = self.step / self.steps if self.steps else 0.0
        if not self.minutes or self.step == 0:
            return by_steps
        return max(by_steps, self.seconds / (60 * self.minutes))

    def agree(self, interrupted: bool) -> tuple[float, bool]:
        """Return the largest `fraction_done` of all ranks, and whether any was interrupted. Collective: all call it."""
        # Clocks differ, but all processes must run the same steps.
        if self._host_group is None:
            return self.fraction_done, interrupted
        largest = torch.tensor([self.fraction_done, interrupted], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host_group)
        return float(largest[0]), bool(largest[1])


class LossMeter:
    """Sums loss and accuracy on the device, over all processes, since the last `update_state`."""

    def __init__(self, draft_len: int, accelerator: Accelerator):
        self.accelerator = accelerator
        self._sums = torch.zeros(2 + 2 * draft_len, device=accelerator.device)  # loss, weight, then counts [2, K]
        self._bad_step = torch.tensor(-1, device=accelerator.device)  # the first step whose loss was not finite
        self._process_tokens = 0  # tokens that this process read
        self.tokens = 0  # processed tokens of all processes at the last `check_finite`, including padding

    def add(self, step: int, batch_loss: BatchLoss) -> None:
        """Add the loss of a batch of optimizer step `step`, counted from 0."""
        self._sums[0] += batch_loss.loss.detach()
        self._sums[2:] += torch.cat([batch_loss.attempted, batch_loss.correct])
        self.expect_finite(step, batch_loss.loss.detach())

    def expect_finite(self, step: int, value: Tensor) -> None:
        """Make the next `check_finite` raise an error if `value`, `[]`, of optimizer step `step` is not finite."""
        # On the device, without a wait: only the first bad step is kept, and `check_finite` reads it later.
        self._bad_step = torch.where((self._bad_step < 0) & ~torch.isfinite(value), step, self._bad_step)

    def add_weight(self, weight: Tensor, tokens: int) -> None:
        """Add the weight `[]` of this process's predictions in a step, and its number of tokens."""
        self._sums[1] += weight
        self._process_tokens += tokens

    def check_finite(self) -> None:
        """Wait for the device; raise `NotFiniteLossError` for a loss that is not finite. Collective."""
        # One gather for both numbers, since each costs a synchronisation.
        local = torch.stack([self._bad_step, torch.tensor(self._process_tokens, device=self._bad_step.device)])
        bad_steps, tokens = zip(*self.accelerator.gather(local[None]).tolist(), strict=True)
        self.tokens = sum(tokens)
        if max(bad_steps) >= 0:
            step = 1 + min(step for step in bad_steps if step >= 0)
            raise NotFiniteLossError(f"the loss was not finite at step {step}; lower --lr, or check base and data")

    def update_state(self, state: TrainingState, *, reset: bool = True) -> None:
        """Update loss and accuracy of a state, unless nothing was added since the last call.

        Without `reset` the next call includes the same batches again. Calls `check_finite`, so it waits for the device
        and is collective.
        """
        self.check_finite()
        # Sums are gathered only when shown: each gather is a collective and waits for the device.
        loss, weight, *counts = self.accelerator.gather(self._sums[None]).sum(dim=0).tolist()
        if weight == 0:
            return
        attempted, correct = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        state.loss = loss / weight
        # `max` avoids a division by zero at depths that no rollout reached.
        state.accuracy = [right / max(tried, 1) for right, tried in zip(correct, attempted, strict=True)]
        if reset:
            self._sums.zero_()
