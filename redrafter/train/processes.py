"""Processes started by a launcher, which must train one drafter together, and the trackers that they report to."""

import os
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, broadcast

from redrafter.app.flags import flag
from redrafter.app.program import print_message
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.train.config import TrainConfig

# Environment variables of `accelerate launch` that ask for a way to spread the model, and the name of that way.
SPREADING_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """Raise `UnsupportedError` if accelerate is configured to spread the drafter in its own way."""
    for variable, name in SPREADING_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"accelerate is configured for {name}, which does not train drafters; start it with torchrun "
                "--nproc-per-node N, or run accelerate config again without it; --shard-base spreads the base, and "
                "--shard-drafter the drafter"
            )


def stays_on_cpu(config: TrainConfig) -> bool:
    """Return whether to train on the CPU: because `config` asks for it, or because there is no other device.

    accelerate joins several processes on CPUs to one group only if it is told that they use the CPU.
    """
    return config.cpu or not torch.accelerator.is_available()


def new_accelerator(config: TrainConfig, **arguments: Any) -> Accelerator:
    """Make an accelerator as `accelerate launch` configured it, with the mixed precision and the device of `config`.

    Args:
        config: Options of the training.
        arguments: Further arguments of `Accelerator`.

    Raises:
        UnsupportedError: accelerate is configured to spread the drafter in its own way.
        ArgumentError: This is one of several processes that would each train a drafter of its own, or the only process
            and `config` asks for several.
    """
    check_launcher()
    # With one draft step the matrix of the recurrence's state has no gradient.
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
    for name in ("shard_base", "shard_drafter"):
        if getattr(config, name) and accelerator.num_processes == 1:
            raise ArgumentError(f"{flag(name)} is for several processes: start them with accelerate launch")
    return accelerator


def broadcast_weights(drafter: RecurrentDrafter, accelerator: Accelerator) -> None:
    """Give the first process's weights to the drafters of all. Collective: call it on every rank."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(broadcast(weight.to(accelerator.device, copy=True)))


def launcher_refused() -> bool:
    """Return whether `check_launcher` raises, and report its error once. Collective: call it in every process.

    The processes return together, because a launcher ends all of them, the reporting one too, as soon as one fails.
    """
    try:
        check_launcher()
    except UnsupportedError as error:
        state = PartialState(cpu=True)
        if state.is_main_process:
            print_message("error", error)
        state.wait_for_everyone()
        return True
    return False


def tracker_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `Accelerator` that name the trackers. Raises `ArgumentError` if one is not installed."""
    for name in config.report_to:
        if find_spec(name) is None:
            raise ArgumentError(f"--report-to {name} needs its package: pip install {name}")
    return {"log_with": list(config.report_to), "project_dir": f"{config.output}.logs"} if config.report_to else {}


def start_trackers(config: TrainConfig, accelerator: Accelerator) -> None:
    """Start the trackers, with the options of this run."""
    if config.report_to:
        options = {
            name: value if isinstance(value, int | float | bool) else str(value)
            for name, value in asdict(config).items()
        }
        accelerator.init_trackers("redrafter", config=options)
