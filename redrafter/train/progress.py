"""How far a training is, and how well it goes, without making the host wait for the device at every step."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor
from tqdm import tqdm

from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig
from redrafter.train.loss import Losses

__all__ = ["Clock", "Console", "Meter", "NotFiniteError", "Numbers", "Standing"]


class NotFiniteError(ArgumentError):
    """A loss was not a number. step: from 0; process: whose batch it was."""

    def __init__(self, step: int, process: int, rows: str = ""):
        super().__init__(
            f"the loss was not finite at step {step + 1}{rows}; lower --lr, or check the base and the data"
        )
        self.step, self.process = step, process


@dataclass
class Standing:
    """Where a training stands. tokens: read, padding included. walked: tokens per step that validation found, by step;
    best_step: of the best of them. loss, accuracy: of the last reading; seconds: without validations and the first
    step."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    accuracy: list[float] = field(default_factory=list)
    walked: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None

    def judge(self, value: float) -> bool:
        """Note what validation found at this step; whether it is the best so far."""
        self.walked[self.step] = value
        better = self.best_step is None or value >= self.walked[self.best_step]
        self.best_step = self.step if better else self.best_step
        return better


@dataclass(frozen=True)
class Numbers:
    """What there is to say of the steps since the last time. done: part of the training; rate: the learning rate."""

    step: int
    steps: int | None
    done: float
    seconds: float
    speed: float  # tokens/s
    loss: float
    accuracy: list[float]
    rate: float

    @property
    def left(self) -> float | None:
        """Seconds to go; None while nothing is known."""
        return self.seconds * (1 - self.done) / self.done if self.done > 0 and self.seconds > 0 else None

    def __str__(self) -> str:
        whole = f"/{self.steps}" if self.steps else ""
        left = f", {_time(max(self.left, 0))} left" if self.left is not None else ""
        right = " ".join(f"{part:.3f}" for part in self.accuracy)
        return (
            f"step {self.step}{whole}  {_time(self.seconds)}{left}  {self.speed:,.0f} tokens/s  loss {self.loss:.4f}  "
            f"right {right}  lr {self.rate:.1e}"
        )

    def logged(self) -> dict[str, float]:
        """For trackers."""
        depths = {f"right at step {depth}": part for depth, part in enumerate(self.accuracy, start=1)}
        return {"loss": self.loss, "lr": self.rate, "tokens/s": self.speed} | depths


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Clock:
    """Steps and time of a training, its validations and checkpoints left out. spent: seconds of those, by name."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, standing: Standing | None = None):
        self.steps, self.minutes, self.accelerator = config.steps, config.minutes, accelerator
        self.at = standing or Standing()
        self.spent: dict[str, float] = {}
        self._before = self.at.seconds
        self.start()

    @property
    def step(self) -> int:
        return self.at.step

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def start(self) -> None:
        """Begin to count, with the next step."""
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def noted(self, what: str, *, stopped: bool = False) -> Iterator[None]:
        """Note how long it takes; stopped: and do not count it."""
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self._began += took if stopped else 0
        self.spent[what] = self.spent.get(what, 0.0) + took

    @property
    def part(self) -> float:
        """Which part of the training is done, as far as this process knows; 1 or more at its end."""
        by_steps = self.step / self.steps if self.steps else 0.0
        if not self.minutes or self.step == 0:
            return by_steps
        return max(by_steps, self.seconds / (60 * self.minutes))

    def agreed(self) -> float:
        """The same in every process. All must ask."""
        if self.minutes and self.accelerator.num_processes > 1:  # clocks differ, and all must take the same steps
            return float(broadcast(torch.tensor(self.part, device=self.accelerator.device)))
        return self.part


class Meter:
    """Loss and accuracy since the last reading, over all processes, summed on the device.

    loss: per target. accuracy[k]: how often step k + 1 was right, among rollouts whose earlier steps were. tokens: read
    since the beginning, padding included, as of the last reading.
    """

    def __init__(self, draft_len: int, accelerator: Accelerator):
        self.accelerator = accelerator
        self._sums = torch.zeros(2 + 2 * draft_len, device=accelerator.device)  # loss, weight, then counts [2, K]
        self._bad = torch.tensor(-1, device=accelerator.device)  # the first step whose loss was not finite
        self._own = 0  # tokens of this process
        self.loss, self.accuracy, self.tokens = float("nan"), [float("nan")] * draft_len, 0

    def add(self, step: int, losses: Losses) -> None:
        """A batch of step number `step`, from 0."""
        self._sums[0] += losses.loss.detach()
        self._sums[2:] += torch.cat([losses.seen, losses.right])
        self.check(step, losses.loss.detach())

    def check(self, step: int, value: Tensor) -> None:
        """A number `[]` of that step that must be finite."""
        self._bad = torch.where((self._bad < 0) & ~torch.isfinite(value), step, self._bad)

    def weigh(self, weight: Tensor, tokens: int) -> None:
        """The weight `[]` of all targets of a step of this process, and how many tokens it read."""
        self._sums[1] += weight
        self._own += tokens

    def verify(self) -> None:
        """Wait for the device; in every process. Raises `NotFiniteError` when a loss was not finite."""
        own = torch.stack([self._bad, torch.tensor(self._own, device=self._bad.device)])
        bad, tokens = zip(*self.accelerator.gather(own[None]).tolist(), strict=True)
        self.tokens = sum(tokens)
        if max(bad) >= 0:
            step, process = min((step, process) for process, step in enumerate(bad) if step >= 0)
            raise NotFiniteError(step, process)

    def read(self) -> None:
        """The same, and take the means."""
        self.verify()
        loss, weight, *counts = self.accelerator.gather(self._sums[None]).sum(dim=0).tolist()
        if weight == 0:
            return
        seen, right = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        self.loss, self.accuracy = loss / weight, [r / max(s, 1) for r, s in zip(right, seen, strict=True)]
        self._sums.zero_()


class Console:
    """Where news go: on a terminal a bar below them on stderr, else each on a line. Use it in `with`."""

    def __init__(self, log: Callable[[str], object], shown: bool | None = None):
        """shown: whether there is a bar; None: where stderr is a terminal."""
        self.log, self._bar = log, None
        if sys.stderr.isatty() if shown is None else shown:
            form = "{percentage:3.0f}%|{bar:20}| {desc}"
            self._bar = tqdm(total=1.0, bar_format=form, dynamic_ncols=True)

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, line: str) -> None:
        with tqdm.external_write_mode():
            self.log(line)

    def show(self, numbers: Numbers) -> None:
        if self._bar is None:
            self.log(str(numbers))
            return
        self._bar.n = min(numbers.done, 1.0)
        self._bar.set_description_str(str(numbers))
