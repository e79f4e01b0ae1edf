"""LoRA adapters of a model: a low-rank product for each token of a forward, with the weights of its row's adapter.

The weights of all adapters of a layer are concatenated into two matrices, slot by slot. A forward multiplies its tokens
by the first matrix, keeps for each token the columns of its own slot, and multiplies by the second one. So all shapes
are fixed, tokens of any adapters share a forward, and a captured step can use an adapter that is loaded later.

An adapter keeps its slot from loading until it is unloaded and no sequence uses it.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from redrafter.errors import ArgumentError, MismatchError, UnsupportedError
from redrafter.features import ADAPTERS, ENCODER_ADAPTER, IMAGES, FeatureSet
from redrafter.model.patch import ModelPatch, Running
from redrafter.parallel.local_shards import SplitLinear, shards_of

if TYPE_CHECKING:  # it imports this module
    from redrafter.model.tree_forward import BoundModel

TRIAL_ROWS, TRIAL_TOKENS = 2, 16  # size of the forward in which the layers of an adapter are watched


@dataclass(frozen=True)
class LoraWeights:
    """The weights of one LoRA adapter.

    Attributes:
        source: Origin of the weights, for messages.
        layers: By name of a layer, its A `[r, in]` and its B `[out, r]` multiplied by the adapter's scaling, float32.
    """

    source: str
    layers: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(len(a) for a, _ in self.layers.values())


def adapter_refusal(source: object, reason: str) -> UnsupportedError:
    """Return the error of an adapter that is not a product of each token alone."""
    return UnsupportedError(
        f"{source} cannot be applied with others: {reason}; merge it into its model with PEFT's merge_and_unload(), "
        "and use what that saves"
    )


@dataclass(frozen=True)
class Adapter:
    """An adapter that is loaded.

    Attributes:
        name: Its name.
        slot: Its slot in the stacks, from 1.
        number: Unique number; an adapter that is loaded again under its name has another one.
        left_out: Names of its layers that no text token passes through, such as those of an image encoder.
    """

    name: str
    slot: int
    number: int
    left_out: tuple[str, ...] = ()

    def check_images(self) -> None:
        """Raise `UnsupportedError` if it changes how images are encoded, as the encoder runs without adapters."""
        if self.left_out:
            FeatureSet(f"the adapter {self.name!r} changes {self.left_out[0]}", ENCODER_ADAPTER).check(IMAGES)


def _widths(layer: Any) -> tuple[int, int]:
    """Return the input and output features of a linear layer."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def _for_layers(model: nn.Module, weights: LoraWeights) -> LoraWeights:
    """Return an adapter's weights as a model has its layers: on one of several ranks, the parts of this rank.

    Raises `MismatchError` or `UnsupportedError` if the model lacks linear layers of their names and widths.
    """
    fitting: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (a, b) in weights.layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            message = f"{weights.source} was made for another model: {type(model).__name__} has no layer {name}"
            raise MismatchError(message) from None
        if layer is model.get_output_embeddings():  # type: ignore[operator]
            raise adapter_refusal(weights.source, f"it changes {name}, the model's head")
        if not isinstance(layer, nn.Linear | Conv1D | SplitLinear):
            raise adapter_refusal(weights.source, f"{name} is not a linear layer but a {type(layer).__name__}")
        shard = shards_of(model).get(f"{name}.weight")
        if (a.shape[1], len(b)) != (widths := _widths(layer) if shard is None else shard.shape[::-1]):
            raise MismatchError(
                f"{weights.source} was made for another model: its {name} reads {a.shape[1]} numbers and writes "
                f"{len(b)}; in {type(model).__name__} it reads {widths[0]} and writes {widths[1]}"
            )
        if shard is None:
            fitting[name] = a, b
        else:  # of split input features, each rank has its share of the sum
            part = shard.name.removesuffix(".weight")
            fitting[part] = (a, shard.cut(b)) if shard.dim == 0 else (shard.cut(a), b)
    return replace(weights, layers=fitting)


def merge_into(model: nn.Module, weights: LoraWeights) -> None:
    """Add an adapter to the weights of a model, permanently.

    Raises:
        MismatchError: The model lacks a layer of the adapter, or has it in another size.
        UnsupportedError: A layer cannot be added to, such as one of a quantised model.
    """
    weights = _for_layers(model, weights)
    for name in weights.layers:
        weight = model.get_submodule(name).weight
        if not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1):
            raise UnsupportedError(
                f"{weights.source} cannot be merged into {name}, which is quantised: give the model as it was before"
            )
    with torch.inference_mode(False), torch.no_grad():
        for name, (a, b) in weights.layers.items():
            layer: Any = model.get_submodule(name)
            # Conv1D stores its weight transposed.
            change = (b @ a).T if isinstance(layer, Conv1D) else b @ a
            layer.weight.data += change.to(layer.weight)


class _Adapted(nn.Module):
    """A stand-in for a layer, with its weight and bias, that adds the product of each token's adapter."""

    def __init__(self, layer: Any, a: Tensor, b: Tensor, running: Running):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.in_features, self.out_features = _widths(layer)
        self.running, self.a, self.b = running, a, b
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's; only the layer's in forwards of other threads."""
        running, output = self.running, self.layer(x)
        if running.elsewhere():
            return output
        inner = linear(x.to(self.a.dtype), self.a)  # [..., S * R]
        keep = running.value.to(inner.device).view(inner.shape)
        # Not a product with a mask: 0 * inf in the columns of another adapter would be NaN.
        return output + linear(torch.where(keep, inner, 0.0), self.b).to(output.dtype)


class LoraStacks:
    """The weights of S adapters of rank R at most, for the layers that any of them changes.

    Attributes:
        version: Number of times that layers were added: a captured or compiled forward contains only the layers of its
            time.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype):
        """Make stacks without slots or layers. device: device of the tokens' adapter slots."""
        self._model, self._device, self._dtype = model, device, dtype
        self.slots = self.rank = self.version = 0
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: A `[S * R, in]` and B `[out, S * R]`
        self._stand_ins: dict[str, _Adapted] = {}
        self._running = Running()  # marks the columns that each token keeps, as `keep` returns them

    def set_sizes(self, slots: int, rank: int) -> None:
        """Set the numbers of slots and of columns of each, before a layer is added."""
        self.slots, self.rank = slots, rank
        self._columns = torch.arange(1, slots + 1, device=self._device).repeat_interleave(rank)  # slot of each column

    def write(self, slot: int, weights: LoraWeights, layers: Sequence[str]) -> None:
        """Write the layers of an adapter that text tokens pass through into a slot, which no token uses now."""
        columns = slice((slot - 1) * self.rank, slot * self.rank)
        with torch.inference_mode(False), torch.no_grad():
            new: dict[str, tuple[Tensor, Tensor]] = {}
            for name in layers:
                if name in self._weights:
                    continue
                layer: Any = self._model.get_submodule(name)
                device, width, (inputs, outputs) = layer.weight.device, self.slots * self.rank, _widths(layer)
                if device.type == "meta":
                    raise UnsupportedError(
                        f"adapters cannot be applied where {name} is moved to its device layer by layer: load the "
                        "model whole, or merge the adapter into it with PEFT's merge_and_unload()"
                    )
                like = {"dtype": self._dtype, "device": device}
                new[name] = torch.zeros(width, inputs, **like), torch.zeros(outputs, width, **like)
            self._weights |= new
            self.version += bool(new)
            for name, (stacked_a, stacked_b) in self._weights.items():
                # Zeros first: the slot's last adapter may have had a higher rank or other layers.
                stacked_a[columns], stacked_b[:, columns] = 0, 0
                if name in layers:
                    a, b = weights.layers[name]
                    stacked_a[columns][: len(a)] = a.to(stacked_a)
                    stacked_b[:, columns][:, : len(a)] = b.to(stacked_b)

    def keep(self, adapters: Tensor) -> Tensor:
        """Return which columns each token keeps, `[..., S * R]` bool, by its slot, `[...]` int64, 0 for none."""
        return adapters[..., None] == self._columns

    def set_keep(self, keep: Tensor) -> None:
        """Set the columns that the tokens of the running forward keep, as returned by `keep`."""
        self._running.value = keep

    def add_to(self, patch: ModelPatch, keep: Tensor) -> None:
        """Have stand-ins in the places of the layers, or of fused ones, which apply what `keep` returned."""
        patch.set_running(self._running, keep)
        for name in self._weights:
            parent_name, _, attribute = name.rpartition(".")
            parent = self._model.get_submodule(parent_name)
            layer = parent._modules[attribute]
            stand_in = self._stand_ins.get(name)
            # the object is reused, or a compiler would see a new one
            if stand_in is None or stand_in.layer is not layer:
                stand_in = self._stand_ins[name] = _Adapted(layer, *self._weights[name], self._running)
            patch.put(parent._modules, attribute, stand_in)


class AdapterSlots:
    """Loads and unloads the adapters of a model by name, and holds their slots while sequences use them.

    Threads may share it.

    Attributes:
        stacks: The weights.
    """

    def __init__(self, bound: "BoundModel", try_tokens: Callable[[Tensor], object]):
        """Begin without adapters of a model, through which `try_tokens` runs tokens `[B, M]` int64."""
        self._model, self.stacks = bound.model, LoraStacks(bound.model, bound.device, bound.dtype)
        self._try_tokens, self._features, self._model_lock = try_tokens, bound.features, bound.lock
        self._by_name: dict[str, Adapter] = {}
        self._holds: Counter[int] = Counter()  # number of sequences by slot
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the adapters that are loaded, in the order of loading."""
        return list(self._by_name)

    def load(self, name: str, weights: LoraWeights, max_loras: int, max_lora_rank: int) -> Adapter:
        """Load an adapter into a free slot. It applies to rows whose `ForwardBatch.inputs` have the slot.

        Args:
            name: Name of the adapter.
            weights: Its weights.
            max_loras: Number of adapters to allocate for, if this is the first one.
            max_lora_rank: Maximum rank to allocate for, likewise.

        Raises:
            ArgumentError: The name is taken, or no slot is free.
            MismatchError: It was made for another model.
            UnsupportedError: It cannot be applied to each token separately, or not to this model.
        """
        self._features.check(ADAPTERS)
        with self._model_lock, self._lock:  # no forward runs
            if name in self._by_name:
                raise ArgumentError(f"an adapter {name!r} is loaded already: unload it first, or use another name")
            weights = _for_layers(self._model, weights)
            if not (stacks := self.stacks).version:
                stacks.set_sizes(max_loras, max_lora_rank)
            if weights.rank > stacks.rank:
                raise ArgumentError(
                    f"{weights.source} has rank {weights.rank}, and there is room for rank {stacks.rank}: raise "
                    "max_lora_rank (--max-lora-rank)"
                )
            layers = self._watched_layers(weights)
            # A slot is free when no sequence uses it any more, also the slot of an adapter that was unloaded.
            taken = {adapter.slot for adapter in self._by_name.values()} | set(+self._holds)
            slot = next((slot for slot in range(1, stacks.slots + 1) if slot not in taken), None)
            if slot is None:
                unloaded = len(taken) - len(self._by_name)
                raise ArgumentError(
                    f"there is room for {stacks.slots} adapters, and {len(self._by_name)} are loaded"
                    + (f", while sequences of {unloaded} that were unloaded continue" if unloaded else "")
                    + ": unload one, or raise max_loras (--max-loras)"
                )
            # Written before the adapter is listed, so that no request can use it half loaded.
            stacks.write(slot, weights, layers)
            self._features.add(ADAPTERS)
            left_out = tuple(layer for layer in weights.layers if layer not in layers)
            adapter = self._by_name[name] = Adapter(name, slot, next(self._numbers), left_out)
            return adapter

    def unload(self, name: str) -> None:
        """Unload an adapter. Sequences that use it continue; its slot is free when the last one ends.

        Raises:
            ArgumentError: There is no such adapter.
        """
        with self._lock:
            del self._by_name[self._find(name).name]

    def _find(self, name: str) -> Adapter:
        if name in self._by_name:
            return self._by_name[name]
        loaded = ", ".join(map(repr, self._by_name)) or "none"
        raise ArgumentError(f"no adapter {name!r} is loaded, but {loaded}: load_adapter({name!r}, path) first")

    def hold(self, name: str, count: int = 1) -> Adapter:
        """Return the adapter of a name, whose slot stays reserved until `release` is called for all `count` holds.

        A sequence is one hold. All of them use the same adapter, even if the name is loaded again.

        Raises:
            ArgumentError: There is no such adapter.
        """
        with self._lock:
            adapter = self._find(name)
            self._holds[adapter.slot] += count
            return adapter

    def release(self, adapter: Adapter, count: int = 1) -> None:
        """Return holds of an adapter."""
        with self._lock:
            self._holds[adapter.slot] -= count

    @contextmanager
    def holding(self, names: Sequence[str | None]) -> Iterator[list[Adapter | None]]:
        """Yield the adapter of each name, None for None, and hold them inside the context.

        Raises:
            ArgumentError: There is no such adapter.
        """
        held: list[Adapter | None] = []
        try:
            for name in names:
                held.append(None if name is None else self.hold(name))
            yield held
        finally:
            for adapter in held:
                if adapter is not None:
                    self.release(adapter)

    def _watched_layers(self, weights: LoraWeights) -> list[str]:
        """Return the layers of an adapter that text tokens pass through.

        Layers of another part of the model, such as an image encoder, are left out, as text does not reach them.

        Raises:
            UnsupportedError: A layer of the decoder does not read each token of a forward, in their order.
        """
        inputs: dict[str, list[int]] = {name: [] for name in weights.layers}
        count = TRIAL_ROWS * TRIAL_TOKENS
        # Multiples of a prime give distinct ids, so that no two tokens of the trial are alike.
        table = self._model.get_input_embeddings().weight
        ids = torch.arange(count, device=table.device) * 7919 % len(table)
        with ModelPatch() as patch, torch.no_grad():
            for name, read in inputs.items():
                note = lambda _, args, read=read: read.append(args[0].numel() // args[0].shape[-1])  # noqa: E731
                patch.hook(self._model.get_submodule(name), note, before=True)
            self._try_tokens(ids.view(TRIAL_ROWS, TRIAL_TOKENS))
        decoder = {id(module) for module in self._model.get_decoder().modules()}
        for name, counts in inputs.items():
            in_decoder = id(self._model.get_submodule(name)) in decoder
            if set(counts) != {count} and (counts or in_decoder):
                raise adapter_refusal(weights.source, f"{name} does not read each token once, as an expert does not")
        return [name for name, counts in inputs.items() if counts]
