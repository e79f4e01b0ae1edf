"""A base spread over the processes' devices, for one that is too large for each of them."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from redrafter.errors import UnsupportedError
from redrafter.target.drafter_inputs import decoder_stack

__all__ = ["load_sharded"]


def load_sharded(load: Callable[[], PreTrainedModel], accelerator: Accelerator) -> PreTrainedModel:
    """Load a base and spread it over the processes' devices. Collective: call it in every process.

    The processes load in turn, so that the host holds one whole copy at a time.

    Args:
        load: Loads the whole base to the CPU.
        accelerator: Processes that share the base, of which there are several.

    Raises:
        UnsupportedError: The model's layers cannot be found.
    """
    model: PreTrainedModel | None = None
    for process in range(accelerator.num_processes):
        if process == accelerator.process_index:
            model = load()
            _shard(model, accelerator)
        accelerator.wait_for_everyone()
    assert model is not None
    with torch.no_grad():  # allocates the buffers that layers are gathered in, which must not be inference tensors
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=accelerator.device))
    return model


def _shard(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Spread each decoder layer over all processes; it is gathered for its forward, which all must run together.

    The weights outside of the layers (embedding, last norm, head) are whole on every device, because they are also used
    apart from the model's own forward. Raises `UnsupportedError` where a model's layers cannot be found.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stack = decoder_stack(model, count)
    if stack is None:
        raise UnsupportedError(f"{type(model).__name__} does not hold its {count} layers in a list; no --shard-base")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in stack:
        fully_shard(layer, mesh=mesh)
    layers = {id(weight) for weight in stack.parameters()}
    whole = {weight for weight in model.parameters() if id(weight) not in layers}
    fully_shard(model, mesh=mesh, ignored_params=whole)  # so that layers fetch each other's weights ahead
    base: Any = model
    base.to(accelerator.device)
