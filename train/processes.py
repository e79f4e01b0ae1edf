"""The processes that a launcher started, which must train one drafter together."""

import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs

from redrafter.cli.program import report
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.train.config import TrainConfig

__all__ = ["check_launcher", "new_accelerator", "refuse_together", "stays_on_cpu"]

# The variable by which `accelerate launch` asks for a way of spreading a model, and that way's name.
SPREADING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """Raise `UnsupportedError` if accelerate is configured to spread the drafter itself over the processes."""
    for variable, name in SPREADING.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"accelerate is configured for {name}, but each process trains a whole drafter; start it with "
                "torchrun --nproc-per-node N, or run accelerate config again without it; --shard-base spreads the base"
            )


def stays_on_cpu(config: TrainConfig) -> bool:
    """Whether to train on the CPU: if asked to, and where there is nothing else, since accelerate makes several
    processes one group there only when told so."""
    return config.cpu or not torch.accelerator.is_available()


def new_accelerator(config: TrainConfig, **arguments: Any) -> Accelerator:
    """Make an accelerator as `accelerate launch` configured it, but for what `config` says itself.

    Raises `UnsupportedError` as `check_launcher` does, and `ArgumentError` if this is one of several processes that
    would each train a drafter of its own.
    """
    check_launcher()
    # With one draft step the matrix that carries the recurrence on has no gradient.
    handler = DistributedDataParallelKwargs(find_unused_parameters=config.draft_len == 1)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, cpu=stays_on_cpu(config), kwargs_handlers=[handler], **arguments
    )
    started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if accelerator.num_processes == 1 < started:
        raise ArgumentError(
            f"{started} processes were started, which cannot work together on {accelerator.device.type}; "
            "start one, or pass --cpu"
        )
    return accelerator


def refuse_together(error: ReDrafterError) -> int:
    """Report once what stops every process, and end them together, lest a launcher ends the one that is to report.

    Collective: call it in all processes. Returns the exit code.
    """
    state = PartialState(cpu=True)
    if state.is_main_process:
        report("error", error)
    state.wait_for_everyone()
    return 2
