"""GGUF files as models: which file a name stands for, what its header says, and how transformers is asked to read it.

transformers dequantises the weights when it reads them, so that a model from a GGUF file is a plain one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from redrafter.errors import CheckpointError, MissingDependencyError, UnsupportedError, first_line, how_to_install

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
# Keys of the ids that end a turn where that is not the end token, as in Gemma's and Llama 3's files.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that the name of a model stands for, or None.

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
    """Yield what `from_pretrained` of transformers takes for a model: a name, and `gguf_file=` where it is a GGUF file.

    The name of a GGUF file's model is an empty directory. In the file's own one transformers would prefer a
    tokenizer.json, and in the working directory a file of the same name.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        MissingDependencyError: The package gguf is not installed.
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
    with TemporaryDirectory(prefix="redrafter-") as empty:
        yield empty, {"gguf_file": str(file.absolute())}


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        metadata: Its keys and values, without long lists.
        tensors: Name, shape, format and position of each tensor.
        data_start: Byte at which the tensors' data begin.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[Any, ...]
    data_start: int

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype that "auto" stands for: the file's own where it is not quantised, else bfloat16."""
        import torch

        # By ggml's ids. Files of 16 bits have their norms in float32.
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
        """Names of the formats of its tensors, the one that most weights have first."""
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
        UnsupportedError: It has tensors in a format that transformers does not read.
    """
    status = file.stat()
    return _read_header(file.absolute(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_header(file: Path, size: int, changed: int) -> GgufHeader:
    from transformers.integrations.gguf.reader import GgufHeader as Theirs
    from transformers.integrations.gguf.reader import read_gguf_metadata

    with file.open("rb") as start:
        if start.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    try:
        metadata, _ = read_gguf_metadata(str(file))
        header = Theirs.from_file(str(file))
    except Exception as error:  # as many kinds as there are places to cut a file
        if "not supported" in str(error):
            raise UnsupportedError(first_line(error)) from error
        raise CheckpointError(
            f"{file} is truncated or damaged: its header cannot be read; download it again"
        ) from error
    end = header.data_start + max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if end > size or not header.tensors:
        raise CheckpointError(f"{file} is truncated: it has {size:,} bytes of {end:,}; download it again")
    return GgufHeader(header.architecture, metadata, header.tensors, header.data_start)


def read_rows(file: Path, header: GgufHeader, tensor: Any, first: int, last: int) -> "torch.Tensor":
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
