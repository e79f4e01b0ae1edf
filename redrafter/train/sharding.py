"""Shard the frozen base, or the drafter with its gradients and optimizer states, over the devices of all processes."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.errors import UnsupportedError
from redrafter.model.forward_batch import decoder_stack
from redrafter.train.config import TrainConfig
from redrafter.train.loss import BatchLoss, Unroll
from redrafter.train.processes import broadcast_weights
from redrafter.train.teacher import TeacherOutput


class ShardedDrafter:
    """A copy of a drafter that is sharded over several processes; its weights are gathered for each batch.

    Every method except `spread_optimizer` is collective: call it on every rank.

    `whole` is the drafter in the host's memory. Training starts from the first process's weights. Each weight of
    `drafter`, the copy, is a `DTensor`.
    """

    def __init__(self, whole: TrainableDrafter, config: TrainConfig, accelerator: Accelerator):
        self.whole, self.drafter = whole, deepcopy(whole)
        unroll = accelerator.prepare_model(Unroll(self.drafter, config), evaluation_mode=True)  # for its autocast only
        # Before sharding, while every process has whole weights: they may differ without a common seed.
        broadcast_weights(self.drafter, accelerator)
        self._module = _Call(unroll)
        # One unit: the loss reads most weights outside of the forward of the module that owns them.
        fully_shard(self._module, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))

    def __call__(
        self, tokens: Tensor, mask: Tensor, teacher_output: TeacherOutput, segment: Tensor | None = None
    ) -> BatchLoss:
        """Compute the loss of a batch; takes the arguments of `Unroll`."""
        loss: BatchLoss = self._module(lambda unroll: unroll(tokens, mask, teacher_output, segment))
        return loss

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Copy the weights to the whole drafter of each process."""
        for name, weight in self.drafter.named_parameters():
            self.whole.get_parameter(name).copy_(gather_tensor(weight))

    def gather_optimizer(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Gather the state of an optimizer, as for an unsharded drafter, on the CPU.

        Only processes with `keep` return the gathered tensors; others return empty dicts for them.
        """
        state = optimizer.state_dict()
        gathered: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            # Every process must take part in the gather, even those that drop the result.
            whole = {name: gather_tensor(value) for name, value in values.items()}
            gathered[number] = {name: value.cpu() for name, value in whole.items()} if keep else {}
        return state | {"state": gathered}

    def spread_optimizer(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Shard the optimizer state of an unsharded drafter, for `load_state_dict`."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        spread = {
            number: {name: _spread_like(weights[number], value) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        return state | {"state": spread}


class _Call(nn.Module):
    """The module that is sharded; its forward calls a function with an `Unroll`.

    A sharded module moves its tensor arguments to the device, where finding the anchors of a mask makes the host wait;
    tensors in the function's closure are not moved.
    """

    def __init__(self, unroll: Unroll):
        super().__init__()
        self.unroll = unroll

    def forward(self, call: Callable[[Unroll], BatchLoss]) -> BatchLoss:
        """Return the result of `call` for the `Unroll`, whose weights are gathered during the call."""
        return call(self.unroll)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective for a sharded tensor: call it on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole.detach()


def _spread_like(weight: Tensor, value: Tensor) -> Tensor:
    """Shard a value like its weight; a value of another shape stays whole."""
    if not isinstance(weight, DTensor) or value.shape != weight.shape:
        return value
    # Every process has loaded the whole value, so no communication is needed.
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


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
