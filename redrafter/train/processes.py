"""Join the processes that a launcher has started to train one drafter."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast

from redrafter.drafting.drafter_model import DrafterModel
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.parallel.launched import launched_processes
from redrafter.train.config import TrainConfig

# Environment variables of `accelerate launch` that enable another way to shard the model, with its name.
SPREADING_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def stays_on_cpu(config: TrainConfig) -> bool:
    """Return whether to train on the CPU: because `config` sets it, or because there is no other device.

    accelerate creates a process group on CPUs only if this is passed to it explicitly.
    """
    return config.cpu or not torch.accelerator.is_available()


def new_accelerator(config: TrainConfig) -> Accelerator:
    """Create an accelerator with the settings of `accelerate launch` and the mixed precision and device of `config`.

    Raises:
        UnsupportedError: accelerate is configured to shard the drafter itself.
        ArgumentError: Several processes would each train a separate drafter, or `config` requires several processes
            and there is only one.
    """
    for variable, name in SPREADING_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"accelerate is configured for {name}, which does not train drafters; start it with torchrun "
                "--nproc-per-node N, or run accelerate config again without it; --shard-base spreads the base"
            )
    # With a single draft step the recurrence's state matrix has no gradient, which DDP otherwise rejects.
    handler = DistributedDataParallelKwargs(find_unused_parameters=config.draft_len == 1)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, cpu=stays_on_cpu(config), kwargs_handlers=[handler]
    )
    # accelerate silently falls back to independent processes if it cannot form a group, so compare with the launcher.
    started = launched_processes()
    if accelerator.num_processes == 1 < started:
        raise ArgumentError(
            f"{started} processes were started, which cannot work together on {accelerator.device.type}; "
            "start one, or pass --cpu"
        )
    if config.shard_base and accelerator.num_processes == 1:
        raise ArgumentError("--shard-base is for several processes: start them with accelerate launch")
    return accelerator


def broadcast_weights(drafter: DrafterModel, accelerator: Accelerator) -> None:
    """Broadcast the first process's weights to all drafters. Collective: call it on every rank."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(broadcast(weight.to(accelerator.device, copy=True)))
