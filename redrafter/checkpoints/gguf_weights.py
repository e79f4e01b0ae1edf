"""Matrices of GGUF files: as grouped weights, in the numbers that the file has, or dequantised.

transformers knows which tensor of a file is which weight of a model, and how llama.cpp's converter has permuted its
rows. So its loader gets small cards in place of matrices, which it renames and permutes as if they were these. A card
has a row for each of the matrix, with the number of the tensor and that of the row.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from redrafter.errors import warn
from redrafter.files.gguf_file import GgufModel, shape_of
from redrafter.kernels.grouped_linear import is_fast
from redrafter.kernels.grouped_weight import HALF, GroupedWeight, join_rows, narrowest
from redrafter.model.quantized_layers import GroupedLinear

AT_ONCE = 1 << 18  # weights that are read at a time, so that the steps find them in a processor's cache
_TABLE = "token_embd.weight"  # which is read by row
CARD = 8  # bytes of a row of a card, two numbers: whatever dtype their values are cast to, it has the numbers to 255
# By a byte, which has the fifth bits of eight codes, the lowest first: these bits, in eight bytes.
_FIFTH_BITS = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) << 4).to(torch.uint8).view(torch.int64).flatten()
_LOW_BITS = 0x0F0F0F0F0F0F0F0F  # the lower four of eight bytes


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 numbers at a byte of each block, `[F, B]`."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _q4_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].flatten(1), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 4:].flatten(1), _halves(blocks, 0), _halves(blocks, 2))


def _five_bits(bits: Tensor, codes: Tensor) -> Tensor:
    """Return codes from 0 to 31, `[F, D]` int8, from 32 fifth bits and 16 bytes of a block."""
    # Eight codes at a time, in a third of the time of operations on bytes.
    words = codes.clone(memory_format=torch.contiguous_format).view(torch.int64)  # also of one block: aligned
    eights = _FIFTH_BITS.index_select(0, bits.flatten().int())
    low, high = eights.view(bits.shape).split(2, dim=2)
    low |= words & _LOW_BITS
    high |= words >> 4 & _LOW_BITS
    return eights.view(torch.int8).view(len(codes), -1)


def _q5_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_five_bits(blocks[..., 2:6], blocks[..., 6:]).sub_(16), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_five_bits(blocks[..., 4:8], blocks[..., 8:]), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of the eight groups of a block of Q4_K or Q5_K."""
    scale, minimum, rest = blocks[..., 4:16].split(4, dim=2)
    scale = torch.cat([scale & 63, rest & 15 | scale >> 2 & 48], 2)
    minimum = torch.cat([minimum & 63, rest >> 4 | minimum >> 2 & 48], 2)
    products = (_halves(blocks, 0).float()[..., None] * scale, -_halves(blocks, 2).float()[..., None] * minimum)
    return narrowest(products[0].flatten(1)), narrowest(products[1].flatten(1))


def _q4_k(blocks: Tensor) -> GroupedWeight:
    # 32 bytes have the codes of two groups, in their low and in their high bits.
    first, second = blocks[..., 16:].unflatten(2, (4, 2, HALF)).unbind(3)
    codes = torch.stack([first & 15 | second << 4, first >> 4 | second & 240], dim=3)
    return GroupedWeight(codes.flatten(1), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> GroupedWeight:
    pairs = blocks[..., 48:].unflatten(2, (4, 32))
    codes = torch.stack([pairs & 15, pairs >> 4], 3).flatten(2, 3)  # [F, B, 8, 32]
    bits = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    codes |= (bits & 1) << 4
    return GroupedWeight(codes.flatten(1).view(torch.int8), *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> GroupedWeight:
    low = blocks[..., :128].unflatten(2, (2, 1, 64)) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(2, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (low & 15).flatten(1) | (high & 3).flatten(1) << 4
    scale = _halves(blocks, 208).float()[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedWeight(codes.view(torch.int8) - 32, narrowest(scale.flatten(1)))


# By ggml's name of a format: the bytes of a block, and what reads blocks, [F, B, bytes] uint8.
READERS: dict[str, tuple[int, Callable[[Tensor], GroupedWeight]]] = {
    **{"Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k), "Q5_0": (22, _q5_0)},
    **{"Q5_1": (24, _q5_1), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k), "Q8_0": (34, _q8_0)},
}


def is_grouped(tensor: Any) -> bool:
    """Return whether a tensor of `GgufModel.tensors` is a matrix in a format that is computed as it is stored."""
    return tensor.tensor_type.name in READERS and len(tensor.shape) == 2


def read_parts(tensor: Any, rows: "np.ndarray[Any, Any] | None" = None) -> Iterator[GroupedWeight]:
    """Yield the rows of a tensor in one of the formats of `READERS`, some at a time, as grouped weights.

    Their numbers are those that `gguf.dequantize` returns.

    Args:
        tensor: One of `GgufModel.tensors`; its leading dimensions are flattened.
        rows: Their order, `[F]`; None for that of the file.
    """
    size, read_blocks = READERS[tensor.tensor_type.name]
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(AT_ONCE // shape_of(tensor)[-1], 1)
    for start in range(0, len(data), step):
        part = data[start : start + step].copy() if rows is None else data[rows[start : start + step]]
        weight = read_blocks(torch.from_numpy(part).unflatten(1, (-1, size)))
        if not all(bool(x.isfinite().all()) for x in (weight.scale, weight.minimum) if x is not None):
            raise ValueError(f"scales or minima of its tensor {tensor.name} are not all finite")
        yield weight


def dequantize(tensor: Any, dtype: torch.dtype = torch.float32, rows: "np.ndarray[Any, Any] | None" = None) -> Tensor:
    """Return a tensor of `GgufModel.tensors`, in its shape: computed in float32, then rounded to `dtype`.

    `rows` is as in `read_parts`.
    """
    if tensor.tensor_type.name not in READERS:
        values = import_module("gguf.quants").dequantize(tensor.data, tensor.tensor_type)
        return torch.tensor(values if rows is None else values[rows]).to(dtype).reshape(shape_of(tensor))
    numbers, start = torch.empty(shape_of(tensor), dtype=dtype).flatten(0, -2), 0
    for part in read_parts(tensor, rows):
        numbers[start : start + part.shape[0]] = part.dequantize(dtype)
        start += part.shape[0]
    return numbers.view(shape_of(tensor))


def describe_formats(file: GgufModel) -> str:
    """Describe in what the tensors of each format of a file are computed, with their share of the weights."""
    entries: dict[tuple[str, str], list[int]] = {}
    for tensor in file.tensors:
        kind = tensor.tensor_type.name
        form = "as they are" if kind in ("F32", "F16", "BF16") else "dequantised"
        if tensor.name != _TABLE and is_grouped(tensor):
            size, read_blocks = READERS[kind]
            weight = read_blocks(torch.zeros(1, 1, size, dtype=torch.uint8))
            form = f"{weight.bits}-bit codes, groups of {weight.group}"
        entries.setdefault((kind, form), []).append(int(tensor.n_elements))
    total = sum(tensor.n_elements for tensor in file.tensors)
    return "; ".join(
        f"{len(sizes)} tensor{'s' * (len(sizes) > 1)} {kind} ({sum(sizes) / total:.1%} of the weights): {form}"
        for (kind, form), sizes in sorted(entries.items(), key=lambda entry: -sum(entry[1]))
    )


class GgufWeights:
    """The matrices of a GGUF file, on their way into a model that transformers loads.

    Attributes:
        file: The file.
        grouped: Whether linear layers get weights as the file has them; else all are dequantised.
        dtype: Dtype that "auto" selects for the other weights and for activations.
    """

    def __init__(self, file: GgufModel, *, device: torch.device | str, as_stored: bool):
        """Choose how a file is read; nothing is read before transformers does.

        Args:
            file: The file.
            device: Device on which the model will be.
            as_stored: Whether linear layers may get grouped weights, where the device has a kernel for them.
        """
        wanted = as_stored and any(map(is_grouped, file.tensors))
        self.file, self.grouped, self.dtype = file, wanted and is_fast(device), file.dtype
        if self.grouped and torch.device(device).type == "cpu":
            self.dtype = torch.float32  # in which products are computed, so that drafts are exact
        elif wanted and not self.grouped and torch.device(device).type != "cpu":  # where the lack of a compiler is said
            warn(f"there is no kernel for weights of 4 and 8 bits on {device}: the file's {file.stored_as} is widened")
        self._tensors = {id(tensor.data): tensor for tensor in file.tensors}
        self._cards: dict[int, np.ndarray[Any, Any]] = {}
        self._places: dict[str, tuple[Any, np.ndarray[Any, Any]]] = {}  # a tensor and its rows, by names of weights

    def load_checkpoint(
        self, load: Callable[..., dict[str, Any]], path: str, return_tensors: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Return what transformers' `load_gguf_checkpoint`, given as `load`, returns of the file.

        Weights of linear layers that are to be grouped are one number, expanded to their shape.
        """
        if not return_tensors:
            return load(path, **options)
        dtype, modules = options.get("torch_dtype") or torch.float32, dict(options["model_to_load"].named_modules())
        parsed = self._load_cards(lambda: load(path, return_tensors=True, **options))
        tensors = parsed["tensors"]
        for name in tensors:
            if (place := self._find_place(tensors[name])) is None:
                continue
            tensor, rows = self._places[name] = place
            if self.grouped and type(modules.get(name.removesuffix(".weight"))) is nn.Linear and is_grouped(tensor):
                tensors[name] = torch.zeros((), dtype=dtype).expand(shape_of(tensor))
            else:
                tensors[name] = dequantize(tensor, dtype, rows)
        return parsed

    def dequantize(self, data: "np.ndarray[Any, Any]", kind: object) -> "np.ndarray[Any, Any]":
        """Return what transformers gets from `gguf.dequantize`: a card, or the numbers of a tensor, in float32."""
        card = self._cards.get(id(data))
        return dequantize(self._tensors[id(data)]).numpy() if card is None else card

    def _load_cards(self, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call transformers' loader with cards in place of the matrices that it only renames and permutes."""
        self._cards = {
            key: _new_card(number, shape_of(tensor)[0])
            for number, (key, tensor) in enumerate(self._tensors.items())
            if len(tensor.shape) == 2
        }
        while True:
            try:
                parsed = load()
            except Exception:
                if not self._cards:
                    raise
                self._cards = {}  # since a matrix is reshaped by its columns
                continue
            found = {id(place[0].data) for x in parsed["tensors"].values() if (place := self._find_place(x))}
            if found == self._cards.keys():
                return parsed
            self._cards = {key: card for key, card in self._cards.items() if key in found}

    def _find_place(self, x: Tensor) -> "tuple[Any, np.ndarray[Any, Any]] | None":
        """Return the tensor of the file that a card refers to, and the order of its rows; None for another tensor."""
        if x.dim() != 2 or x.shape[1] != CARD:
            return None
        tensors = list(self._tensors.values())
        numbers, rows = x.to(torch.uint8).numpy().view(np.uint32).T
        if numbers[0] >= len(tensors) or (numbers != numbers[0]).any():
            return None
        tensor = tensors[numbers[0]]
        return (tensor, rows) if np.array_equal(np.sort(rows), np.arange(shape_of(tensor)[0])) else None

    @torch.no_grad()
    def group_layers(self, model: PreTrainedModel) -> None:
        """Replace linear layers of the loaded model by grouped ones; a tied head gets the numbers of the table."""
        if not self.grouped:
            return
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        names = {module: name for name, module in model.named_modules()}
        for layer in list(names):
            place = self._places.get(f"{names[embedding if tied and layer is head else layer]}.weight")
            if type(layer) is nn.Linear and place is not None and is_grouped(place[0]):
                model.set_submodule(names[layer], GroupedLinear(layer, join_rows(list(read_parts(*place)))))


def _new_card(number: int, rows: int) -> "np.ndarray[Any, Any]":
    return np.stack([np.full(rows, number, np.uint32), np.arange(rows, dtype=np.uint32)], axis=1).view(np.uint8)
