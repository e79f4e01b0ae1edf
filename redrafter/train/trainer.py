"""The parts of a training, and what is done with them: an optimizer step, a validation, a checkpoint."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import CheckpointError, first_line
from redrafter.train.checkpoints import Checkpoint, Checkpoints, gather_random_states, restore_random_state
from redrafter.train.config import TrainConfig
from redrafter.train.loss import Unroll, total_weight
from redrafter.train.progress import Clock, LossMeter, Progress
from redrafter.train.sharding import ShardedDrafter, gather_tensor
from redrafter.train.teacher import Teacher

__all__ = ["Trainer", "TrainingResult"]


ADAM_BETAS = (0.9, 0.95)


def make_optimizer(drafter: RecurrentDrafter, config: TrainConfig, device: torch.device) -> AdamW:
    """Make AdamW over all weights of a drafter; weight decay applies to matrices only."""
    weights = list(drafter.parameters())
    matrices, vectors = ([weight for weight in weights if (weight.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=device.type == "cuda")


@dataclass(frozen=True)
class TrainingResult:
    """What a training did.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens that were read, padding included.
        seconds: Time spent training, without validations, checkpoints and the first step.
        loss: Mean loss over the last interval of progress.
        accuracy: Entry k is the accuracy of draft step k + 1 among rollouts whose earlier steps were all right, over
            the last interval of progress.
        tokens_per_step: Result of each validation, by optimizer step.
        best_step: Optimizer step of the best validation; None without validations.
        seconds_by_activity: Seconds spent validating and saving, which `seconds` leaves out, and waiting for batches,
            which it includes.
    """

    steps: int
    tokens: int
    seconds: float
    loss: float
    accuracy: list[float]
    tokens_per_step: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None
    seconds_by_activity: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Base, drafter, optimizer and clock of a training.

    Args:
        model: The base, which is moved to the accelerator's device.
        drafter: Float32 drafter to train. Where it is spread over the processes, it is up to date in a validation, in
            a checkpoint and after `gather_drafter`.
        config: Options of the training.
        accelerator: Processes that train together.
        resumed: Checkpoint that `drafter` was loaded from; None for a new training.

    Attributes:
        validate: Measures the drafter's tokens per step; None for no validation.
        checkpoints: Where checkpoints are written; None for none.
        teacher: The base.
        meter: Loss and accuracy since the last line of progress.
        clock: Steps and time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: RecurrentDrafter,
        config: TrainConfig,
        accelerator: Accelerator,
        resumed: Checkpoint | None,
    ):
        self.drafter, self.config, self.accelerator = drafter, config, accelerator
        self.validate: Callable[[], float | None] | None = None
        self.checkpoints: Checkpoints | None = None
        base: Any = model
        self.teacher = Teacher(base.to(accelerator.device), drafter.config.target_layers)
        self.meter = LossMeter(config.draft_len, accelerator)
        drafter.train()
        self.sharded = ShardedDrafter(drafter, config, accelerator) if config.shard_drafter else None
        self.trained = drafter if self.sharded is None else self.sharded.drafter
        optimizer = make_optimizer(self.trained, config, accelerator.device)
        if self.sharded is None:
            self.unroll, self.optimizer = accelerator.prepare(Unroll(drafter, config), optimizer)
        else:
            self.unroll, self.optimizer = self.sharded, accelerator.prepare(optimizer)
        if isinstance(self.unroll, DistributedDataParallel):
            # Else it moves the mask to the device, where the positions that count cannot be found without waiting.
            self.unroll.device_ids = None
        if resumed is not None:
            self._load(resumed)
        self.clock = Clock(config, accelerator, None if resumed is None else deepcopy(resumed.state))
        self.tokens_before = self.clock.state.tokens  # read before a resume

    def step(self, group: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        """Make one optimizer step on the mean loss over some batches of all processes."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate
        weight = sum((total_weight(mask, self.config) for _, mask, *_ in group), torch.zeros(()))
        weight = self._to_device(weight)
        # Gradients are averaged over the processes.
        mean_weight = self.accelerator.reduce(weight.clone(), "mean").clamp(min=1e-9)
        for index, (tokens, mask, *segment) in enumerate(group):
            tokens, *segment = map(self._to_device, (tokens, *segment))
            teacher_output = self.teacher.read(tokens, *segment)
            last = index == len(group) - 1  # where the gradients are averaged over the processes
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.unroll):
                batch_loss = self.unroll(tokens, mask, teacher_output, *segment)
                self.accelerator.backward(batch_loss.loss / mean_weight)
            self.meter.add(self.clock.step, batch_loss)
        self.meter.add_weight(weight, sum(tokens.numel() for tokens, *_ in group))
        norm = self.accelerator.clip_grad_norm_(self.trained.parameters(), self.config.max_grad_norm)
        if self.accelerator.scaler is None:  # which skips steps whose gradients are not finite
            self.meter.expect_finite(self.clock.step, gather_tensor(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.state.step += 1

    def time_waiting(self, groups: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yield the groups and note the time that they take to come."""
        while True:
            with self.clock.timed("waiting for data"):
                group = next(groups, None)
            if group is None:
                return
            yield group

    def read_meter(self) -> None:
        """Wait for the device and bring the state up to date. Collective: call it on every rank."""
        self.meter.read()
        self._note_time()
        state = self.clock.state
        state.accuracy = self.meter.accuracy
        state.loss = self.meter.loss if math.isfinite(self.meter.loss) else None

    def progress(self) -> Progress:
        """Return the progress as of the last `read_meter`."""
        clock, meter = self.clock, self.meter
        return Progress(
            step=clock.step,
            steps=clock.steps,
            fraction_done=clock.fraction_done,
            seconds=clock.seconds,
            speed=clock.state.tokens / max(clock.seconds, 1e-9),
            loss=meter.loss,
            accuracy=meter.accuracy,
            learning_rate=self.optimizer.param_groups[0]["lr"],
        )

    def gather_drafter(self) -> None:
        """Bring `drafter` up to date where it is spread. Collective: call it on every rank."""
        if self.sharded is not None:
            self.sharded.gather_weights()

    def run_validation(self) -> None:
        """Validate, and keep the drafter if it is the best so far. Collective: call it on every rank."""
        if self.validate is None:
            return
        self.meter.check_finite()
        with self.clock.timed("validating", paused=True):
            self.gather_drafter()
            accelerator, state = self.accelerator, self.clock.state
            tokens_per_step = self.validate() if accelerator.is_main_process or self.config.shard_base else None
            if tokens_per_step is not None:
                accelerator.log({"tokens per step": tokens_per_step}, step=state.step)
                is_best = state.add_validation(tokens_per_step)
                keep = is_best and self.config.validate_every and accelerator.is_main_process
                if keep and self.checkpoints is not None:
                    self.checkpoints.save_best(self.drafter, state)
            self.accelerator.wait_for_everyone()

    def save(self) -> None:
        """Write a checkpoint. Collective: call it on every rank."""
        if self.checkpoints is None:
            return
        self.meter.check_finite()
        self._note_time()
        with self.clock.timed("saving", paused=True):
            accelerator, scaler = self.accelerator, self.accelerator.scaler
            random_states = gather_random_states(accelerator)
            self.gather_drafter()
            if self.sharded is None:
                state = self.optimizer.state_dict()
            else:
                state = self.sharded.gather_optimizer(self.optimizer, keep=accelerator.is_main_process)
            if accelerator.is_main_process:
                optimizer = {"optimizer": state, "scaler": None if scaler is None else scaler.state_dict()}
                self.checkpoints.save(self.drafter, self.clock.state, optimizer, random_states)
            accelerator.wait_for_everyone()

    def result(self) -> TrainingResult:
        """Return what the training did, as of the last `read_meter`."""
        state, meter = self.clock.state, self.meter
        return TrainingResult(
            steps=state.step,
            tokens=state.tokens,
            seconds=state.seconds,
            loss=meter.loss,
            accuracy=meter.accuracy,
            tokens_per_step=state.tokens_per_step,
            best_step=state.best_step,
            seconds_by_activity=self.clock.seconds_by_activity,
        )

    def _note_time(self) -> None:
        """Bring seconds and tokens of the state up to date."""
        state = self.clock.state
        state.seconds, state.tokens = self.clock.seconds, self.tokens_before + self.meter.tokens

    def _load(self, resumed: Checkpoint) -> None:
        """Restore optimizer, random generators and meter. Raises `CheckpointError` for another training's state."""
        saved, random_states = resumed.load_optimizer()
        try:
            state = saved["optimizer"]
            self.optimizer.load_state_dict(
                state if self.sharded is None else self.sharded.spread_optimizer(state, self.optimizer)
            )
            if self.accelerator.scaler is not None and saved["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(saved["scaler"])
            restore_random_state(self.accelerator, random_states)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{resumed.path} is of another training: {first_line(error)}; delete it") from error
        state = resumed.state
        self.meter.loss = state.loss if state.loss is not None else math.nan
        self.meter.accuracy = list(state.accuracy)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device without the host waiting for it."""
        device = self.accelerator.device
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)
