"""Open GGUF files as models: resolve a name to a file, read its header, and let transformers load it.

transformers dequantises the weights when it reads them, so a model from a GGUF file is an ordinary one.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from redrafter.errors import CheckpointError, MissingDependencyError, UnsupportedError, first_line, how_to_install

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_TEXT, _LIST = 8, 9  # types of metadata values that are no numbers; `_NUMBERS` has struct's letters of the others
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
# Keys of the ids that end a turn, as in Gemma's and Llama 3's files, in addition to the end token.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def is_gguf(name: str) -> bool:
    """Return whether there is a file of that name with the ending of GGUF files."""
    return name.endswith(SUFFIX) and os.path.isfile(name)


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that the name of a model refers to, or None.

    It is the file itself, or the one GGUF file in a directory without a config.json.

    Raises:
        CheckpointError: The file does not exist, or the directory has several.
    """
    path = Path(name)
    if path.suffix == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: a GGUF file is given by its path on this machine")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several GGUF files, {names}: give one of them, such as {files[0]}")
    return files[0] if files else None


@contextmanager
def reading(name: str | Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the arguments of transformers' `from_pretrained` for a model: a name, and `gguf_file=` for a GGUF file.

    The name of a GGUF file's model is an empty directory. In the file's own directory, transformers would prefer a
    tokenizer.json, and in the working directory a file with the same name.

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
    read_header(file)
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils.logging import is_progress_bar_enabled

    # Its progress bar is not among those that transformers can switch off.
    reader: Any = modeling_gguf_pytorch_utils
    bar = reader.tqdm
    reader.tqdm = partial(bar, disable=not is_progress_bar_enabled())
    try:
        # An empty directory, so that transformers finds no other file than the GGUF file itself.
        with TemporaryDirectory(prefix="redrafter-") as empty:
            yield empty, {"gguf_file": str(file.absolute())}
    finally:
        reader.tqdm = bar


class GgufTensor(NamedTuple):
    """A tensor's position in a file, `offset` bytes after the first tensor's, and ggml's id of its format."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        metadata: Its keys and values; lists are replaced by their lengths.
        tensors: Its tensors.
        data_start: Offset of the tensors' data in bytes.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_start: int

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
    """Read the header of a GGUF file, without its tensors.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        UnsupportedError: The package gguf is not installed, or too old for the file.
    """
    if find_spec("gguf") is None:
        raise MissingDependencyError(
            f"{file} is read with the package gguf, which is missing: {how_to_install('gguf')}"
        )
    status = file.stat()
    return _read_header(file.absolute(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_header(file: Path, size: int, changed: int) -> GgufHeader:
    # gguf's own reader takes seconds, as it makes an object for each token of the vocabulary.
    from gguf import GGML_QUANT_SIZES

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
                fields = _Fields(data, 4)
                _, tensor_count, count = fields.take("IQQ")
                metadata = {fields.text(): fields.value(*fields.take("I")) for _ in range(count)}
                table = []
                for _ in range(tensor_count):
                    name = fields.text()
                    sizes = fields.take(f"{fields.take('I')[0]}Q")
                    # ggml lists sizes in the reverse order of torch.
                    table.append((name, sizes[::-1], *fields.take("IQ")))
            architecture, alignment = metadata["general.architecture"], metadata.get("general.alignment", 32)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{file} is truncated or damaged: its header cannot be read; download it again"
            ) from error
    if new := {kind for *_, kind, _ in table} - {int(kind) for kind in GGML_QUANT_SIZES}:
        raise UnsupportedError(
            f"{file} has tensors in ggml's format {min(new)}, which the package gguf does not know: "
            "pip install --upgrade gguf"
        )
    tensors = tuple(
        GgufTensor(name, shape, kind, offset, prod(shape) // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1])
        for name, shape, kind, offset in table
    )
    start = -(-fields.at // alignment) * alignment
    end = start + max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    if end > size or not tensors:
        raise CheckpointError(f"{file} is truncated: it has {size:,} bytes of {end:,}; download it again")
    return GgufHeader(architecture, metadata, tensors, start)


@dataclass
class _Fields:
    """Reads the fields of a header in turn, from byte `at` on: github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    data: mmap
    at: int

    def take(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        return bytes(self.take(f"{length}s")[0]).decode()

    def value(self, kind: int) -> Any:
        """Return a value; of a list, its length."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.take(_NUMBERS[kind])[0]
        kind, count = self.take("IQ")
        # Skipped in one step: the lists of a vocabulary have hundreds of thousands of entries.
        if kind in _NUMBERS:
            self.at += count * struct.calcsize(f"<{_NUMBERS[kind]}")
            return count
        for _ in range(count):
            if kind == _TEXT:
                self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
            else:
                self.value(kind)
        return count


def read_rows(file: Path, header: GgufHeader, tensor: GgufTensor, first: int, last: int) -> "torch.Tensor":
    """Return the rows `[first:last]` of a tensor of a GGUF file, dequantised to float32."""
    import torch
    from gguf import GGMLQuantizationType, dequantize

    rows = tensor.shape[0]
    start, width = header.data_start + tensor.offset, tensor.nbytes // rows
    data = torch.from_file(str(file), size=start + last * width, dtype=torch.uint8)[start + first * width :]  # mapped
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
