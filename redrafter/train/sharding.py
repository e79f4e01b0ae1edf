"""Shard a base over the devices of several processes."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from redrafter.errors import UnsupportedError
from redrafter.model.forward_batch import decoder_stack


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
                raise UnsupportedError(
                    f"{type(model).__name__} does not hold its {count} layers in a list; no --shard-base"
                )
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
