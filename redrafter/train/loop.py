"""The training loop: batches in, a trained drafter out. The base stays as it is."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.train.checkpoints import Checkpoint, Checkpoints
from redrafter.train.config import TrainConfig
from redrafter.train.processes import new_accelerator
from redrafter.train.progress import Progress
from redrafter.train.trainer import Trainer, TrainingResult

__all__ = ["train"]


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
    progress: Callable[[Progress], object] | None = None,
) -> TrainingResult:
    """Train `drafter` in place, for `config.steps`, for `config.minutes`, or as long as there are batches.

    Apart from progress, validations and checkpoints, the host never waits for the device.

    Args:
        model: The base, which is moved to the accelerator's device.
        drafter: Float32 drafter to train.
        batches: Batches as `Windows.batches` makes them, on the CPU or on the device: token ids `[B, T]` int64; mask
            `[B, T]` bool, true on the tokens that the base itself is to write; and, where a row holds several texts,
            the number of each token's text, `[B, T]`.
        config: Options of the training, those from `steps` on.
        accelerator: Processes that train together; a new one when None.
        validate: Measures the drafter's tokens per step; called every `config.validate_every` steps and at the end, on
            the main process, or on all where they share the base. Its time is not counted.
        checkpoints: Where a checkpoint is written every `config.save_every` steps.
        resumed: The checkpoint that `drafter` was loaded from, where `batches` go on.
        log: Prints a line of progress every `config.log_every` steps.
        progress: Called with the progress in place of `log`.

    Raises:
        NotFiniteError: The loss of a step was not finite. Nothing is written after that step.
    """
    accelerator = accelerator or new_accelerator(config)
    trainer = Trainer(model, drafter, config, accelerator, resumed)
    trainer.validate, trainer.checkpoints = validate, checkpoints
    show_progress = progress or (lambda numbers: log(str(numbers)))
    clock, meter = trainer.clock, trainer.meter
    is_first_step = True
    with trainer.teacher:
        for group in trainer.time_waiting(_groups(batches, config.accumulate)):
            fraction_done = clock.broadcast_fraction_done()
            if fraction_done >= 1:
                break
            trainer.step(group, config.lr * learning_rate_factor(fraction_done, config.warmup))
            if is_first_step:
                meter.check_finite()  # waits: the first step compiles, and is not to be counted
                clock.start()
                is_first_step = False
            if clock.step % config.log_every == 0:
                trainer.read_meter()
                numbers = trainer.progress()
                accelerator.log(numbers.for_trackers(), step=clock.step)
                if accelerator.is_main_process:
                    show_progress(numbers)
            if config.validate_every and clock.step % config.validate_every == 0:
                trainer.run_validation()
            if config.save_every and clock.step % config.save_every == 0:
                trainer.save()
    trainer.read_meter()
    if clock.step not in clock.state.tokens_per_step:
        trainer.run_validation()
    trainer.gather_drafter()
    drafter.eval()
    return trainer.result()


def _groups(batches: Iterable[tuple[Tensor, ...]], size: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Group the batches of each optimizer step: `size` of them, at the end perhaps fewer."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def learning_rate_factor(fraction_done: float, warmup: float) -> float:
    """Return the learning rate as a share of its peak: linear up, times a cosine down to 0.

    Args:
        fraction_done: Share of the training that is done, from 0 to 1.
        warmup: Share of the training in which the rate rises from 0.
    """
    rise = fraction_done / warmup if fraction_done < warmup else 1.0
    return rise * (1 + math.cos(math.pi * fraction_done)) / 2
