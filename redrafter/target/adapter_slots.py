"""The LoRA adapters that are loaded beside a model, by name: each has a slot of the stacks while any text needs it."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.target.lora_layers import LoraStacks, LoraWeights, check_layers
from redrafter.target.patch import ModelPatch

__all__ = ["Adapter", "AdapterSlots"]

TRIAL_ROWS, TRIAL_TOKENS = 2, 16  # of the forward in which the layers of an adapter are watched


@dataclass(frozen=True)
class Adapter:
    """An adapter that is loaded.

    Attributes:
        name: Its name.
        slot: Its slot in the stacks, from 1.
        number: Its number among all that were ever loaded; one that is loaded again under its name has another.
        left_out: Names of its layers that no token of a text passes through, such as those of an encoder of images.
    """

    name: str
    slot: int
    number: int
    left_out: tuple[str, ...] = ()

    def check_images(self) -> None:
        """Raise `UnsupportedError` where it changes how images are encoded, which the model does alone."""
        if self.left_out:
            raise UnsupportedError(
                f"the adapter {self.name!r} takes no images here: it changes {self.left_out[0]}, which no text passes "
                "through, and images are encoded without adapters; merge it into its model with PEFT's "
                "merge_and_unload()"
            )


class AdapterSlots:
    """Loads and unloads the adapters of a model, and holds their slots while texts are written with them.

    Threads may share it.

    Attributes:
        stacks: The weights; None before the first adapter.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, try_tokens: Callable[[Tensor], object]):
        """Begin without adapters.

        Args:
            model: The causal LM.
            device: Device of its embedding.
            dtype: Dtype of its hidden states.
            try_tokens: Runs tokens `[B, M]` int64 through the model.
        """
        self._model, self._device, self._dtype, self._try_tokens = model, device, dtype, try_tokens
        self.stacks: LoraStacks | None = None
        self._by_name: dict[str, Adapter] = {}
        self._holds: Counter[int] = Counter()  # texts by slot
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the adapters that are loaded, in the order of loading."""
        return list(self._by_name)

    def load(self, name: str, weights: LoraWeights, max_loras: int, max_lora_rank: int) -> Adapter:
        """Load an adapter into a free slot.

        Args:
            name: What to call it.
            weights: Its weights.
            max_loras: Adapters that there is room for, if this is the first one.
            max_lora_rank: Their largest rank, likewise.

        Raises:
            ArgumentError: The name is taken, or there is no room for it.
            MismatchError: It was made for another model.
            UnsupportedError: It cannot be applied to each token by itself.
        """
        with self._lock:
            if name in self._by_name:
                raise ArgumentError(f"an adapter {name!r} is loaded already: unload it first, or use another name")
            check_layers(self._model, weights)
            stacks = self.stacks or LoraStacks(self._model, self._device, self._dtype, max_loras, max_lora_rank)
            if weights.rank > stacks.rank:
                raise ArgumentError(
                    f"{weights.source} has rank {weights.rank}, and there is room for rank {stacks.rank}: raise "
                    "max_lora_rank (--max-lora-rank)"
                )
            layers = self._watched_layers(weights)
            slot = self._free_slot(stacks.slots)
            stacks.write(slot, weights, layers)
            self.stacks = stacks
            left_out = tuple(layer for layer in weights.layers if layer not in layers)
            adapter = self._by_name[name] = Adapter(name, slot, next(self._numbers), left_out)
            return adapter

    def _free_slot(self, slots: int) -> int:
        taken = {adapter.slot for adapter in self._by_name.values()} | set(+self._holds)
        slot = next((slot for slot in range(1, slots + 1) if slot not in taken), None)
        if slot is None:
            unloaded = len(taken) - len(self._by_name)
            raise ArgumentError(
                f"there is room for {slots} adapters, and {len(self._by_name)} are loaded"
                + (f", while texts of {unloaded} that were unloaded go on" if unloaded else "")
                + ": unload one, or raise max_loras (--max-loras)"
            )
        return slot

    def unload(self, name: str) -> None:
        """Forget an adapter. Texts that are being written with it go on; its slot is free when the last one ends.

        Raises:
            ArgumentError: There is no such adapter.
        """
        with self._lock:
            del self._by_name[self._find(name).name]

    def _find(self, name: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            loaded = ", ".join(map(repr, self._by_name)) or "none"
            raise ArgumentError(f"no adapter {name!r} is loaded, but {loaded}: load_adapter({name!r}, path) first")
        return adapter

    def hold(self, name: str, count: int = 1) -> Adapter:
        """Return the adapter of a name, whose slot is kept until `release` has taken back as many holds.

        Args:
            name: The adapter's name.
            count: Number of holds, one a text: all have the same adapter, whoever loads and unloads meanwhile.

        Raises:
            ArgumentError: There is no such adapter.
        """
        with self._lock:
            adapter = self._find(name)
            self._holds[adapter.slot] += count
            return adapter

    def release(self, adapter: Adapter, count: int = 1) -> None:
        """Take back holds of an adapter."""
        with self._lock:
            self._holds[adapter.slot] -= count

    @contextmanager
    def holding(self, names: Sequence[str | None]) -> Iterator[list[Adapter | None]]:
        """Yield the adapter of each name, None for None, and hold them inside the context.

        Raises:
            ArgumentError: There is no such adapter.
        """
        with ExitStack() as stack:
            held: list[Adapter | None] = []
            for name in names:
                held.append(None if name is None else self.hold(name))
                if (adapter := held[-1]) is not None:
                    stack.callback(self.release, adapter)
            yield held

    def _watched_layers(self, weights: LoraWeights) -> list[str]:
        """Return the layers of an adapter that a text's tokens pass through.

        Layers of another part of the model, such as one that sees images, are left out: a text has none.

        Raises:
            UnsupportedError: A layer of the decoder does not read each token of a forward, in their order.
        """
        inputs: dict[str, list[int]] = {name: [] for name in weights.layers}
        with ModelPatch() as patch:
            for name, read in inputs.items():

                def note(_: nn.Module, args: tuple[Tensor, ...], read: list[int] = read) -> None:
                    read.append(args[0].numel() // args[0].shape[-1])

                patch.hook(self._model.get_submodule(name), note, before=True)
            count = TRIAL_ROWS * TRIAL_TOKENS
            known = len(self._model.get_input_embeddings().weight)
            ids = torch.arange(count, device=self._device) * 7919 % known
            with torch.no_grad():
                self._try_tokens(ids.view(TRIAL_ROWS, TRIAL_TOKENS))
        decoder = {id(module) for module in self._model.get_decoder().modules()}
        for name, counts in inputs.items():
            in_decoder = id(self._model.get_submodule(name)) in decoder
            if set(counts) != {count} and (counts or in_decoder):
                raise UnsupportedError(
                    f"{weights.source} cannot be applied beside others: {name} does not read each token once, as an "
                    "expert does not; merge it into its model with PEFT's merge_and_unload(), and serve what that saves"
                )
        return [name for name, counts in inputs.items() if counts]
