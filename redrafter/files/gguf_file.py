"""Open GGUF files as models: resolve a name to a file, read its header, and let transformers load it.

transformers dequantises the weights when it reads them, so a model from a GGUF file is an ordinary one. A model that
llama.cpp has split is named by any of its parts, and read from all of them.
"""

import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from redrafter.errors import CheckpointError, MissingDependencyError, UnsupportedError, first_line, how_to_install

if TYPE_CHECKING:
    import torch

_PATCHING = threading.RLock()
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # the names that llama-gguf-split gives
_VERSIONS = (2, 3)
_FLOAT, _BOOL, _TEXT, _LIST, _INT = 6, 7, 8, 9, 11  # types of metadata values
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # with struct's letters
_TOKENS = "tokenizer.ggml.tokens"
# Keys of the ids that end a turn, as in Gemma's and Llama 3's files, in addition to the end token.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def is_gguf(name: str) -> bool:
    """Return whether there is a file of that name with the ending of GGUF files."""
    return name.endswith(SUFFIX) and os.path.isfile(name)


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that the name of a model refers to, or None.

    It is the file itself, or the one GGUF file in a directory without a config.json; the first part of a split model.

    Raises:
        CheckpointError: The file does not exist, or another part of it, or the directory has several.
    """
    path = Path(name)
    if path.suffix == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: a GGUF file is given by its path on this machine")
        return find_parts(path)[0]
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted({find_parts(file)[0] for file in path.glob(f"*{SUFFIX}")})
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several GGUF files, {names}: give one of them, such as {files[0]}")
    return files[0] if files else None


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model from the name of one; else the name alone."""
    match = PART.fullmatch(name)
    count = 0 if match is None else int(match[3])
    return [f"{match[1]}-{number:05}-of-{match[3]}{SUFFIX}" for number in range(1, count + 1)] if match else [name]


def find_parts(file: Path) -> list[Path]:
    """Return the files of the model that a GGUF file belongs to. Raises `CheckpointError` if one is missing."""
    parts = [file.with_name(name) for name in part_names(file.name)]
    if missing := [part for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{missing[0]} does not exist: the model is split into {len(parts)} files (split.count), and is read from "
            f"all of them; download the others to the same directory"
        )
    return parts


@contextmanager
def reading(name: str | Path, *, texts: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the arguments of transformers' `from_pretrained` for a model: a name, and `gguf_file=` for a GGUF file.

    The name of a GGUF file's model is an empty directory. In the file's own directory, transformers would prefer a
    tokenizer.json, and in the working directory a file with the same name.

    Args:
        name: Name of the model.
        texts: Whether the tokenizer's arrays are read; a model needs the number of tokens alone.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        UnsupportedError: The package gguf is not installed, or too old for the file.
    """
    file = find_gguf(name)
    if file is None:
        yield str(name), {}
        return
    if find_spec("gguf") is None:
        raise MissingDependencyError(
            f"{file} is read with the package gguf, which is missing: {how_to_install('gguf')}"
        )
    header = read_header(file)
    if len(find_parts(file)) > 1 and header.architecture in _archs_of_one_file():
        raise UnsupportedError(
            f"{file} is one of {len(find_parts(file))} files (split.count), and transformers reads "
            f"{header.architecture} models from one: llama-gguf-split --merge {file} merged{SUFFIX}"
        )
    from transformers.utils.logging import is_progress_bar_enabled

    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    gguf: Any = import_module("gguf")
    with _PATCHING:  # one load at a time, as these modules are the process's
        bar, reader, name_map = loader.tqdm, gguf.GGUFReader, gguf.get_tensor_name_map
        # Its progress bar is not among those that transformers can switch off.
        loader.tqdm = partial(bar, disable=not is_progress_bar_enabled())
        # gguf's own reader makes several objects for each token of the vocabulary, and transformers reads a file three
        # times: 36 s of the 58 that loading a model of 0.5B with 152,000 tokens took. It makes the table of names, of
        # every layer, for each module of the model: 4 s.
        gguf.GGUFReader, gguf.get_tensor_name_map = partial(_FieldsAndTensors, texts=texts), lru_cache(name_map)
        try:
            # An empty directory, so that transformers finds no other file than the GGUF file itself.
            with TemporaryDirectory(prefix="redrafter-") as empty:
                yield empty, {"gguf_file": str(file.absolute())}
        finally:
            loader.tqdm, gguf.GGUFReader, gguf.get_tensor_name_map = bar, reader, name_map


def _archs_of_one_file() -> Sequence[str]:
    # Those that transformers does not read with gguf's reader, but with one of its own.
    return tuple(import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS)


class GgufTensor(NamedTuple):
    """A tensor's file, its first byte in it, and ggml's id of its format."""

    file: Path
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file, or of all parts of a split one.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        metadata: Its keys and values: numbers, truth values and text; tuples of numbers, and lists of undecoded text.
        tensors: Its tensors.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype that "auto" selects: the file's own where it is not quantised, else bfloat16."""
        import torch

        # By ggml's ids. 16-bit files have their norms in float32.
        formats = {tensor.ggml_type for tensor in self.tensors}
        return {frozenset((0,)): torch.float32, frozenset((1,)): torch.float16}.get(
            frozenset(formats - {0} or {0}), torch.bfloat16
        )

    @property
    def ends(self) -> list[int]:
        """Ids that end a text or a turn, in ascending order."""
        return sorted({int(self.metadata[key]) for key in _END_KEYS if key in self.metadata})

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def stored_as(self) -> str:
        """Names of the formats of its tensors, in descending order of the number of weights."""
        from gguf import GGMLQuantizationType

        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            name = GGMLQuantizationType(tensor.ggml_type).name
            sizes[name] = sizes.get(name, 0) + prod(tensor.shape)
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))


def read_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file, and of the other parts of a split model, without their tensors.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        UnsupportedError: The package gguf is not installed, or too old for the file.
    """
    if find_spec("gguf") is None:
        raise MissingDependencyError(
            f"{file} is read with the package gguf, which is missing: {how_to_install('gguf')}"
        )
    parts = [(part.absolute(), part.stat()) for part in find_parts(file)]
    return _read_headers(tuple((part, status.st_size, status.st_mtime_ns) for part, status in parts))


@lru_cache(maxsize=4)
def _read_headers(parts: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    metadata: dict[str, Any] = {}
    tensors: list[GgufTensor] = []
    first = parts[0][0]
    for number, (file, size, _) in enumerate(parts):
        values, table = _read_part(file, size)
        stated = values.get("split.no", 0), values.get("split.count") or 1
        if stated != (number, len(parts)):
            raise CheckpointError(
                f"{file} is part {stated[0] + 1} of split.count = {stated[1]} by its header, and part {number + 1} of "
                f"{len(parts)} by its name: give it the name that it was published with, or merge all parts with "
                "llama-gguf-split --merge"
            )
        metadata |= {key: value for key, value in values.items() if key not in metadata}
        tensors += table
    if "general.architecture" not in metadata or not tensors:
        raise CheckpointError(f"{first} is damaged: its header names no architecture or no tensors; download it again")
    count = metadata.get("split.tensors.count", len(tensors))
    if not len({tensor.name for tensor in tensors}) == len(tensors) == count:
        raise CheckpointError(f"{first} and its other parts are of different models: they do not have {count} tensors")
    return GgufHeader(metadata["general.architecture"], metadata, tuple(tensors))


def _read_part(file: Path, size: int) -> tuple[dict[str, Any], list[GgufTensor]]:
    from gguf import GGML_QUANT_SIZES

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
                fields = _Fields(data, 4)
                version, tensor_count, count = fields.take("IQQ")
                if version not in _VERSIONS:
                    raise UnsupportedError(
                        f"{file} is of version {version:#x} of the format, and versions 2 and 3 are read, in "
                        "little-endian order: convert the model with a newer llama.cpp"
                    )
                metadata = {fields.text().decode(): fields.value(*fields.take("I")) for _ in range(count)}
                table = []
                for _ in range(tensor_count):
                    name = fields.text().decode()
                    sizes = fields.take(f"{fields.take('I')[0]}Q")
                    # ggml lists sizes in the reverse order of torch.
                    table.append((name, sizes[::-1], *fields.take("IQ")))
            alignment = metadata.get("general.alignment", 32)
            start = -(-fields.at // alignment) * alignment
        except (struct.error, UnicodeDecodeError, KeyError, ArithmeticError, MemoryError, ValueError) as error:
            raise CheckpointError(
                f"{file} is truncated or damaged: its header cannot be read; download it again"
            ) from error
    if new := {kind for *_, kind, _ in table} - {int(kind) for kind in GGML_QUANT_SIZES}:
        raise UnsupportedError(
            f"{file} has tensors in ggml's format {min(new)}, which the package gguf does not know: "
            "pip install --upgrade gguf"
        )
    tensors = []
    for name, shape, kind, offset in table:
        items, item_bytes = GGML_QUANT_SIZES[kind]
        tensors.append(GgufTensor(file, name, shape, kind, start + offset, prod(shape) // items * item_bytes))
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
    if end > size:
        raise CheckpointError(f"{file} is truncated: it has {size:,} bytes of {end:,}; download it again")
    return metadata, tensors


@dataclass
class _Fields:
    """Reads the fields of a header in turn, from byte `at` on: github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    data: mmap
    at: int

    def take(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values

    def text(self) -> bytes:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[bytes]:
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        texts = []
        # Names in this loop are local: a vocabulary has hundreds of thousands of entries.
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            texts.append(data[at + 8 : end])
            at = end
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        """Return a value of a type: of a list, its numbers as a tuple, or its texts, undecoded, as a list."""
        if kind == _TEXT:
            return self.text().decode()
        if kind != _LIST:
            return self.take(_NUMBERS[kind])[0]
        kind, count = self.take("IQ")
        if kind == _TEXT:
            return self.texts(count)
        if kind == _LIST:
            return [self.value(kind) for _ in range(count)]
        return self.take(f"{count}{_NUMBERS[kind]}")


class _Field(NamedTuple):
    """A value as `gguf.ReaderField` has it: parts, the indices of those that hold it, and the type of each."""

    parts: Sequence[Any]
    data: Sequence[int]
    types: list[int]

    @classmethod
    def from_value(cls, value: Any) -> "_Field":
        import numpy as np

        if isinstance(value, list):
            return cls(value, range(len(value)), [_TEXT])
        if isinstance(value, tuple):
            return cls([(number,) for number in value], range(len(value)), [_kind_of(*value[:1])])
        kind = _kind_of(value)
        return cls([value.encode() if kind == _TEXT else np.array([value])], [0], [kind])


def _kind_of(value: object = 0) -> int:
    return {str: _TEXT, bool: _BOOL, float: _FLOAT}.get(type(value), _INT)


class _Tensor(NamedTuple):
    """A tensor as `gguf.ReaderTensor` has it, its bytes mapped from the file."""

    name: str
    tensor_type: int
    data: Any


class _FieldsAndTensors:
    """The part of `gguf.GGUFReader` that transformers uses, from this module's header of the file."""

    def __init__(self, path: str, *, texts: bool):
        import numpy as np
        from gguf import GGMLQuantizationType

        header = read_header(Path(path))
        metadata = header.metadata
        if not texts and (tokens := metadata.get(_TOKENS)):
            scalars = {
                key: value
                for key, value in metadata.items()
                if not key.startswith("tokenizer.") or not isinstance(value, list | tuple)
            }
            metadata = scalars | {_TOKENS: [b""] * len(tokens)}
        self.fields = {key: _Field.from_value(value) for key, value in metadata.items()}
        # As ordinary arrays: dequantising slices them, which takes 2 to 4 times as long on a memmap.
        mapped = {tensor.file: np.asarray(np.memmap(tensor.file, np.uint8, "r")) for tensor in header.tensors}
        # `gguf.dequantize` takes bytes of any format, in the tensor's shape but for the last dimension.
        self.tensors = [
            _Tensor(
                x.name,
                GGMLQuantizationType(x.ggml_type),
                mapped[x.file][x.offset : x.offset + x.nbytes].reshape(*x.shape[:-1], -1),
            )
            for x in header.tensors
        ]


def read_rows(tensor: GgufTensor, first: int, last: int) -> "torch.Tensor":
    """Return the rows `[first:last]` of a tensor of a GGUF file, dequantised to float32."""
    import torch
    from gguf import GGMLQuantizationType, dequantize

    rows = tensor.shape[0]
    start, width = tensor.offset, tensor.nbytes // rows
    data = torch.from_file(str(tensor.file), size=start + last * width, dtype=torch.uint8)[start + first * width :]
    values = dequantize(data.view(last - first, width).numpy(), GGMLQuantizationType(tensor.ggml_type))
    return torch.from_numpy(values).float().reshape(last - first, *tensor.shape[1:]).clone()


def gguf_error(what: str, file: Path, error: Exception) -> CheckpointError:
    """Return the error for a `what` (model, tokenizer) that transformers could not make from a GGUF file."""
    architecture, reason = read_header(file).architecture, first_line(error)
    if "architecture" in reason or "model_type" in reason or isinstance(error, KeyError):
        return CheckpointError(
            f"{file} is a {architecture} model, an architecture that transformers does not read from GGUF files: give "
            "the Hugging Face model that it was made from"
        )
    return CheckpointError(f"cannot load a {what} from {file}: {reason}")
