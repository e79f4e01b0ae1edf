"""How far a training is, and how well it goes, without making the host wait for the device at every step."""

import contextlib
import time
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig

__all__ = ["Clock", "Meter"]


class Clock:
    """Steps and time of a training, its validations left out. Time counts from `start`."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator):
        self.steps, self.minutes, self.accelerator = config.steps, config.minutes, accelerator
        self.step, self.tokens, self._began = 0, 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def start(self) -> None:
        """Begin to count, with the next step."""
        self._began = time.perf_counter()

    def tick(self, tokens: int) -> None:
        self.step += 1
        self.tokens += tokens

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        stopped = time.perf_counter()
        yield
        self._began += time.perf_counter() - stopped

    def done(self) -> float:
        """Which part of the training is done; 1 or more at its end. The same in every process."""
        by_steps = self.step / self.steps if self.steps else 0.0
        if not self.minutes or self.step == 0:
            return by_steps
        done = max(by_steps, self.seconds / (60 * self.minutes))
        if self.accelerator.num_processes > 1:  # clocks differ, and all must take the same steps
            return float(broadcast(torch.tensor(done, device=self.accelerator.device)))
        return done

    def __str__(self) -> str:
        whole = f"/{self.steps}" if self.steps else ""
        return f"step {self.step}{whole}  {self.seconds:.0f} s  {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"


class Meter:
    """Loss and accuracy since the last reading, summed on the device.

    loss: per target. accuracy[k]: how often step k + 1 was right, among rollouts whose earlier steps were.
    """

    def __init__(self, draft_len: int, device: torch.device):
        self._sums = torch.zeros(2 + 2 * draft_len, device=device)  # loss, weight, then counts [2, K]
        self._bad = torch.tensor(-1, device=device)  # the first step whose loss was not finite
        self.loss, self.accuracy = float("nan"), [float("nan")] * draft_len

    def add(self, step: int, loss: Tensor, counts: Tensor) -> None:
        """A chunk of step number `step`, from 0: its weighted sum of losses `[]`, and its counts `[2, K]`."""
        self._sums[0] += loss
        self._sums[2:] += counts.flatten()
        self._bad = torch.where((self._bad < 0) & ~torch.isfinite(loss), step, self._bad)

    def weigh(self, weight: Tensor) -> None:
        """The weight `[]` of all targets of a step."""
        self._sums[1] += weight

    def read(self) -> None:
        """Wait for the device and take the means. Raises `ArgumentError` when a loss was not finite."""
        if int(self._bad) >= 0:
            raise ArgumentError(f"the loss was not finite at step {int(self._bad) + 1}; lower --lr, or check the base")
        loss, weight, *counts = self._sums.tolist()
        if weight == 0:
            return
        seen, right = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        self.loss, self.accuracy = loss / weight, [r / max(s, 1) for r, s in zip(right, seen, strict=True)]
        self._sums.zero_()

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  right {' '.join(f'{part:.3f}' for part in self.accuracy)}"
