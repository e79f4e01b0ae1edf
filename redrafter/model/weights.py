"""Weights that are exchanged in place, and memory that is given back for a while.

Fused layers, compiled forwards and captured steps hold the addresses of the tensors that they were made of. So new
numbers are written where the old ones are, and a tensor whose memory was given back stays the same object: its storage
becomes empty, and has its size again later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.errors import ArgumentError, CacheFullError, MismatchError, first_line
from redrafter.files.dtype_names import dtype_name
from redrafter.model.quantized_layers import QuantizedLinear

MOST_NAMED = 3  # names in a message about many


@dataclass(frozen=True)
class NewWeights:
    """New numbers for all weights of a module, which were found to fit, and are not written yet.

    Attributes:
        pairs: Tensors of the module with their new values.
        not_finite: Names of those that become NaN or infinite somewhere, perhaps as the module's dtype rounds them.
        quantised: Our quantised layers and the ordinary weight that each is made of.
    """

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    quantised: list[tuple[QuantizedLinear, Tensor]] = field(default_factory=list)

    @classmethod
    def for_module(cls, module: nn.Module, weights: Mapping[str, Tensor], name: str) -> "NewWeights":
        """Find the place of each tensor in a module; `name` is what messages call it.

        Names are those of the module's `state_dict`. Of tied weights one is enough. Numbers are rounded to the module's
        dtype when they are written, as they are when a checkpoint is loaded; a layer that was quantised when it was
        loaded is quantised again.

        Raises:
            ArgumentError: A weight is no tensor.
            MismatchError: A tensor is missing, is not the module's, or has another shape or kind of numbers.
        """
        new, wrong = cls(), list[str]()
        if odd := [key for key, tensor in weights.items() if not isinstance(tensor, Tensor)]:
            raise ArgumentError(f"weights are tensors by name, and {listed(odd)} is none")
        places: dict[str, Tensor] = module.state_dict(keep_vars=True)
        layers = {f"{prefix}.weight": x for prefix, x in module.named_modules() if isinstance(x, QuantizedLinear)}
        # A quantised head has a weight of its own, and is tied in the checkpoint.
        ties: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
        tied_heads = [key for key in layers if key not in weights and ties.get(key) in weights]
        weights = {**weights, **{key: weights[ties[key]] for key in tied_heads}}
        parts = {_part(key, name): key for key, layer in layers.items() for name in layer.parts if name != "weight"}
        given = {id(places[key]) for key in weights if key in places}
        missing = [key for key, x in places.items() if id(x) not in given and key not in parts]
        if missing:
            wrong.append(f"missing {listed(missing)}")
        if unknown := [key for key in weights if key not in places]:
            wrong.append(f"unknown {listed(unknown)}")
        written: dict[int, tuple[str, Tensor]] = {}
        for key, tensor in weights.items():
            if key not in places or key in parts:
                continue
            place = places[key]
            if key in layers:
                wrong += new._fit(layers[key], key, weights)
            elif tensor.shape != place.shape:
                wrong.append(f"{key} of shape {tuple(tensor.shape)} instead of {tuple(place.shape)}")
            elif not _alike(tensor.dtype, place.dtype):
                wrong.append(f"{key} of {dtype_name(tensor.dtype)}, which does not become {dtype_name(place.dtype)}")
            elif (tied := written.setdefault(id(place), (key, tensor)))[0] != key:
                if tied[1] is not tensor and not torch.allclose(tied[1], tensor.to(tied[1]), 0, 0, equal_nan=True):
                    wrong.append(f"{key}, which is tied to {tied[0]}, with other numbers than that")
            else:
                new.pairs.append((place, tensor))
        whole = {key: part for key, part in parts.items() if key in weights and part in weights}
        if idle := [key for key, part in whole.items() if weights[part].dtype != places[part].dtype]:
            wrong.append(f"scales of weights that are not quantised: {listed(idle)}")
        if wrong:
            raise MismatchError(f"these are not the weights of {name}, and none was written: {'; '.join(wrong)}")
        # A new weight becomes whole numbers, with scales of the dtype in which it must not be infinite.
        rounded = {id(tensor): layer.weight_scale.dtype for layer, tensor in new.quantised}
        dtypes = {key: rounded.get(id(x), places[key].dtype) for key, x in weights.items()}
        new.not_finite.extend(_not_finite({key: (weights[key], dtypes[key]) for key in weights}))
        return new

    def _fit(self, layer: QuantizedLinear, key: str, weights: Mapping[str, Tensor]) -> list[str]:
        """Add the weight of a quantised layer, ordinary or in its parts, or return why it does not fit."""
        tensor = weights[key]
        if tensor.dtype != layer.weight.dtype:
            shape = layer.out_features, layer.in_features
            if tensor.shape != shape:
                return [f"{key} of shape {tuple(tensor.shape)} instead of {shape}"]
            if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
                return [f"{key} of {dtype_name(tensor.dtype)}, which does not become {layer.form}"]
            if not layer.requantizes:
                return [f"{key}, which its file has as {layer.form}: load a file with the new weights"]
            self.quantised.append((layer, tensor))
            return []
        wrong = []
        for name, place in layer.parts.items():
            found = weights.get(_part(key, name))
            if found is None:
                wrong.append(f"{key} of {dtype_name(tensor.dtype)} without {_part(key, name)}")
            elif (found.shape, found.dtype) != (place.shape, place.dtype):
                kinds = (f"{tuple(x.shape)} {dtype_name(x.dtype)}" for x in (found, place))
                wrong.append(f"{_part(key, name)} of shape {' instead of '.join(kinds)}")
            else:
                self.pairs.append((place, found))
        return wrong

    def write(self) -> None:
        """Write all numbers where the old ones are."""
        for layer, tensor in self.quantised:
            new = layer.quantize(tensor.to(layer.weight.device))
            for name, place in layer.parts.items():
                self._copy(place, new[name])
        for place, tensor in self.pairs:
            self._copy(place, tensor)

    @staticmethod
    def _copy(place: Tensor, numbers: Tensor) -> None:
        # A tensor that was made in inference mode can be written there alone.
        with torch.inference_mode(place.is_inference()), torch.no_grad():
            # Copied as bytes, since not every device copies FP8 numbers.
            if place.dtype.itemsize == 1 and place.is_floating_point():
                place.view(torch.uint8).copy_(numbers.view(torch.uint8))
            else:
                # Rounded on their device. A failure after this leaves weights half written.
                place.copy_(numbers.to(place.dtype))


def _part(key: str, name: str) -> str:
    """Return the name of a part of a quantised weight, whose own name is `key`."""
    return key.removesuffix("weight") + name


def hold_in_memory(module: nn.Module) -> None:
    """Copy weights that are mapped from files into memory, so that the files may be written again while they are used.

    transformers leaves weights mapped that stay on the host in the dtype in which they are stored.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        ordinary = type(tensor) in (Tensor, nn.Parameter)  # others, of quantisers, may have no storage
        if ordinary and not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy on the host of a module's weights, as `NewWeights.for_module` takes them."""
    with torch.no_grad():
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}


def _not_finite(weights: Mapping[str, tuple[Tensor, torch.dtype]]) -> list[str]:
    """Return the names of tensors with numbers that are NaN or infinite, or are so in the dtype that goes with each."""
    extremes: dict[torch.device, list[tuple[str, Tensor]]] = {}  # `[2]` float64 each
    for name, (tensor, dtype) in weights.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.dtype.itemsize == 1:  # aminmax knows no FP8
            tensor = tensor.bfloat16()
        least_and_most = torch.stack(torch.aminmax(tensor.detach()))  # NaN if any number is
        if dtype.itemsize > 1:  # what becomes FP8 is scaled before it is rounded
            least_and_most = least_and_most.to(dtype)
        extremes.setdefault(tensor.device, []).append((name, least_and_most.double()))
    names = []
    for named in extremes.values():  # one wait for each device
        finite = torch.stack([values for _, values in named]).isfinite().all(dim=1).tolist()
        names += [name for (name, _), each in zip(named, finite, strict=True) if not each]
    return names


def _alike(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether numbers of one dtype may be rounded to another when they are loaded."""
    if given.is_floating_point and given.itemsize == 1:
        return given == wanted
    return given == wanted or (given.is_floating_point and wanted.is_floating_point)


def listed(names: list[str]) -> str:
    """Return names for a message, the first `MOST_NAMED` of many."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass
class _Storage:
    storage: Any
    num_bytes: int
    address: int
    copy: Tensor | None  # of its bytes, on the host; None where zeros will do

    def bytes(self) -> Tensor:
        """Return all bytes of the storage, as a tensor that shares its memory."""
        whole: Tensor = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return whole


class ParkedMemory:
    """The memory of tensors, while it is given back: all of them have no numbers until `restore`."""

    def __init__(self) -> None:
        self._parked: list[_Storage] = []

    def park(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        """Give the memory of tensors back; with `keep`, their numbers go to the host first, else they become zeros.

        What cannot be given back, such as memory that belongs to a file, stays where it is.
        """
        with torch.no_grad():
            # By storage: several tensors may be views of one, which is released once.
            for storage in {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}.values():
                if not storage.nbytes() or not storage.resizable():
                    continue
                parked = _Storage(storage, storage.nbytes(), storage.data_ptr(), None)
                if keep:
                    parked.copy = parked.bytes().to("cpu", copy=True)
                self._parked.append(parked)
                storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes that were given back."""
        return sum(each.num_bytes for each in self._parked)

    def restore(self) -> bool:
        """Take the memory again, with the numbers that were kept; return whether all of it is where it was.

        Raises:
            CacheFullError: There is too little memory now; nothing has changed then.
        """
        try:
            for each in self._parked:
                each.storage.resize_(each.num_bytes)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            # All or nothing, so that the engine stays asleep and can be woken later.
            for each in self._parked:
                each.storage.resize_(0)
            raise CacheFullError(
                f"{self.num_bytes / 2**30:.2f} GiB that were given back cannot be taken again ({first_line(error)}): "
                "free memory of the device, and wake the engine again"
            ) from error
        with torch.no_grad():
            for each in self._parked:
                # Zeros, as the memory of the released cache may contain anything, also NaN.
                if each.copy is None:
                    each.bytes().zero_()
                else:
                    each.bytes().copy_(each.copy)
        same = all(each.storage.data_ptr() == each.address for each in self._parked)
        self._parked.clear()
        return same
