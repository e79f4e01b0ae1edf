"""Read GGUF files with the package gguf, whose import this module needs."""

import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField


class FastReader(GGUFReader):
    """Reads what `gguf.GGUFReader` reads, and arrays of metadata in a fraction of its time.

    `GGUFReader` makes several objects for each token of a vocabulary: 12 s for 152,000 tokens, and transformers reads a
    file three times. Here an array has the type of its elements, which are `bytes` or tuples of one number. All other
    parts and all tensors are ordinary arrays: slices of a memmap, which `gguf.dequantize` takes, cost 2 to 4 times as
    much.
    """

    def _get(self, *args: Any, **kwargs: Any) -> "np.ndarray[Any, Any]":
        return super()._get(*args, **kwargs).view(np.ndarray)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if self.byte_order != "I":
            raise ValueError("its numbers are in another byte order than this machine's")
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: Any = self.data.base  # a slice of the mmap itself is `bytes`
        kind, count = struct.unpack_from("=IQ", data, orig_offs)
        end, length_at = orig_offs + 12, struct.Struct("=Q").unpack_from
        parts: list[Any] = []
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                begin = end + 8
                end = begin + length_at(data, end)[0]
                parts.append(data[begin:end])
        elif kind == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        else:
            numbers = self._get(end, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
            parts, end = list(zip(numbers.tolist(), strict=True)), end + numbers.nbytes
        if end > len(data) or len(parts) < count:
            raise ValueError("it is cut short")
        return end - orig_offs, parts, (), [GGUFValueType(kind)]

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        if not field.data:  # an array: its elements alone, without a list of their places
            elements = field.parts[3:]
            places: Any = range(len(elements))
            field = field._replace(parts=elements, data=places)
        return super()._push_field(field, skip_sum)
