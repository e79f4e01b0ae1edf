"""Join the processes that a launcher has started to train one drafter, and shard a base over their devices."""

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from redrafter.drafting.drafter_model import DrafterModel
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.model.forward_batch import decoder_stack
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
    on_cpu = stays_on_cpu(config)
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=on_cpu, kwargs_handlers=[handler])
    # accelerate silently falls back to independent processes if it cannot form a group, so compare with the launcher.
    started = launched_processes()
    if accelerator.num_processes == 1 < started:
        what = f"{started} processes were started, which cannot work together on {accelerator.device.type}"
        raise ArgumentError(f"{what}; start one, or pass --cpu")
    if config.shard_base and accelerator.num_processes == 1:
        raise ArgumentError("--shard-base is for several processes: start them with accelerate launch")
    return accelerator


def broadcast_weights(drafter: DrafterModel, accelerator: Accelerator) -> None:
    """Broadcast the first process's weights to all drafters. Collective: call it on every rank."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(broadcast(weight.to(accelerator.device, copy=True)))


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective for a sharded tensor: call it on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole.detach()


def load_sharded(load: Callable[[], PreTrainedModel], accelerator: Accelerator) -> PreTrainedModel:
    """Load a base and shard it over the devices of several processes. Collective: call it on every rank.

    Each decoder layer is sharded over all processes, and gathered for its forward, which all must run together. The
    weights outside of the layers (embedding, final norm, head) are replicated, because they are also used outside of
    the model's own forward. Raises `UnsupportedError` if a model's layers cannot be found.
    """
    model: Any = None
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for process in range(accelerator.num_processes):  # in turn, so that the host holds one whole copy at a time
        if process == accelerator.process_index:
            model = load()
            count = model.config.get_text_config(decoder=True).num_hidden_layers
            stack = decoder_stack(model, count)
            if stack is None:
                message = f"{type(model).__name__} does not hold its {count} layers in a list; no --shard-base"
                raise UnsupportedError(message)
            # Per layer, so that only one layer's weights are gathered at a time.
            for layer in stack:
                fully_shard(layer, mesh=mesh)
            layers = {id(weight) for weight in stack.parameters()}
            whole = {weight for weight in model.parameters() if id(weight) not in layers}
            fully_shard(model, mesh=mesh, ignored_params=whole)  # also wrap the root, so that layers prefetch weights
            model.to(accelerator.device)
        accelerator.wait_for_everyone()
    with torch.no_grad():  # allocates the buffers that layers are gathered in, which must not be inference tensors
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=accelerator.device))
    loaded: PreTrainedModel = model
    return loaded
