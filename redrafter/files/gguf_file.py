"""Open GGUF files as models: resolve a name to a file, read its header, and let transformers load it.

transformers dequantises the weights when it reads them, so a model from a GGUF file is an ordinary one. A model that
llama.cpp has split is named by any of its parts, and read from all of them.
"""

import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from redrafter.errors import CheckpointError, MissingDependencyError, UnsupportedError, first_line, how_to_install

if TYPE_CHECKING:
    import torch

_PATCHING = threading.RLock()
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # the names that llama-gguf-split gives
_TEXT = 8  # type of metadata values
_TOKENS = "tokenizer.ggml.tokens"
NO_TEXT = b""  # in place of the text of a token
# Keys of the ids that end a turn, as in Gemma's and Llama 3's files, in addition to the end token.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


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


class WeightReader(Protocol):
    """Reads the tensors of a file in place of functions of transformers and gguf."""

    def load_checkpoint(self, load: Callable[..., dict[str, Any]], path: str, **options: Any) -> dict[str, Any]:
        """Return what transformers' `load_gguf_checkpoint`, given as `load`, returns of the file."""

    def dequantize(self, data: Any, kind: Any) -> Any:
        """Return what `gguf.dequantize` returns."""


@contextmanager
def reading(
    name: str | Path, *, texts: bool = False, weights: WeightReader | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the arguments of transformers' `from_pretrained` for a model: a name, and `gguf_file=` for a GGUF file.

    The name of a GGUF file's model is an empty directory. In the file's own directory, transformers would prefer a
    tokenizer.json, and in the working directory a file with the same name.

    Args:
        name: Name of the model.
        texts: Whether the tokenizer's arrays are read; a model needs the number of tokens alone.
        weights: What reads the tensors; None where none are read.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        UnsupportedError: The package gguf is not installed, or too old for the file.
    """
    file = find_gguf(name)
    if file is None:
        yield str(name), {}
        return
    model = read_gguf(file)
    if len(find_parts(file)) > 1 and model.architecture in _archs_of_one_file():
        raise UnsupportedError(
            f"{file} is one of {len(find_parts(file))} files (split.count), and transformers reads "
            f"{model.architecture} models from one: llama-gguf-split --merge {file} merged{SUFFIX}"
        )
    from transformers.utils.logging import is_progress_bar_enabled

    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    gguf: Any = import_module("gguf")
    headers: Any = import_module("transformers.integrations.gguf.reader")
    # Versions that convert all tokenizers there read their texts by a reader of their own.
    own_texts = hasattr(import_module("transformers.integrations.gguf"), "convert_gguf_tokenizer")
    opened = model if texts and not own_texts else model.without_texts()
    with _PATCHING:  # one load at a time, as these modules are the process's
        parse, mapped = loader._gguf_parse_value, headers._mapped
        replaced: list[tuple[Any, str, Any]] = [
            # A progress bar that is not among those that transformers can switch off.
            (loader, "tqdm", partial(loader.tqdm, disable=not is_progress_bar_enabled())),
            # transformers reads a file three times, and makes the table of names, of every layer, for each module of
            # the model: 4 s. It parses the texts of all tokens, and slices a memmap for each: 1 s.
            (gguf, "GGUFReader", lambda path: opened),
            (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
            (loader, "_gguf_parse_value", lambda value, kinds: "" if value is NO_TEXT else parse(value, kinds)),
            (headers, "_mapped", lambda path: mapped(path).view(import_module("numpy").ndarray)),
        ]
        if weights is not None:
            load = partial(weights.load_checkpoint, loader.load_gguf_checkpoint)
            replaced += [(loader, "load_gguf_checkpoint", load), (gguf, "dequantize", weights.dequantize)]
        with ExitStack() as undo, TemporaryDirectory(prefix="redrafter-") as empty:
            for module, attribute, value in replaced:
                undo.callback(setattr, module, attribute, getattr(module, attribute))
                setattr(module, attribute, value)
            yield empty, {"gguf_file": str(file.absolute())}


def _archs_of_one_file() -> Sequence[str]:
    # Those that transformers does not read with gguf's reader, but with one of its own.
    return tuple(import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS)


@dataclass(frozen=True)
class GgufModel:
    """A model in one GGUF file, or in all parts of a split one, whose tensors are mapped into memory.

    Attributes:
        fields: Its metadata, each a `gguf.ReaderField`.
        tensors: Its tensors, each a `gguf.ReaderTensor`. transformers reads these two attributes.
    """

    fields: Mapping[str, Any]
    tensors: Sequence[Any]

    def value(self, key: str, default: Any = None) -> Any:
        """Return the number or the text that the metadata have under a key, or the default."""
        field = self.fields.get(key)
        if field is None:
            return default
        value = field.parts[field.data[0]]
        return bytes(value).decode() if field.types == [_TEXT] else value.tolist()[0]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.value("general.architecture"))

    @property
    def tokens(self) -> int:
        """Number of tokens of the vocabulary."""
        return len(self.fields[_TOKENS].data)

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype that "auto" selects: the file's own where it is not quantised, else bfloat16."""
        import torch

        # By ggml's ids. 16-bit files have their norms in float32.
        formats = {int(tensor.tensor_type) for tensor in self.tensors}
        return {frozenset((0,)): torch.float32, frozenset((1,)): torch.float16}.get(
            frozenset(formats - {0} or {0}), torch.bfloat16
        )

    @property
    def ends(self) -> list[int]:
        """Ids that end a text or a turn, in ascending order."""
        return sorted({int(self.value(key)) for key in _END_KEYS if key in self.fields})

    @property
    def stored_as(self) -> str:
        """Names of the formats of its tensors, in descending order of the number of weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + tensor.n_elements
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def without_texts(self) -> "GgufModel":
        """Return it with empty tokens and without other arrays of the tokenizer, whose decoding takes time."""
        arrays = {key for key, x in self.fields.items() if key.startswith("tokenizer.") and len(x.data) > 1}
        fields = {key: field for key, field in self.fields.items() if key not in arrays}
        if _TOKENS in arrays:
            fields[_TOKENS] = self.fields[_TOKENS]._replace(parts=[NO_TEXT] * self.tokens, data=range(self.tokens))
        return replace(self, fields=fields)


def read_gguf(file: Path) -> GgufModel:
    """Open a GGUF file, and the other parts of a split model.

    Raises:
        CheckpointError: The file is not a GGUF file, or truncated.
        UnsupportedError: The package gguf is not installed, or too old for the file.
    """
    if find_spec("gguf") is None:
        message = f"{file} is read with the package gguf, which is missing: {how_to_install('gguf')}"
        raise MissingDependencyError(message)
    parts = [(part.absolute(), part.stat()) for part in find_parts(file)]
    return _read_parts(tuple((part, status.st_size, status.st_mtime_ns) for part, status in parts))


@lru_cache(maxsize=4)
def _read_parts(parts: tuple[tuple[Path, int, int], ...]) -> GgufModel:
    from redrafter.files.gguf_reader import FastReader

    fields: dict[str, Any] = {}
    tensors: list[Any] = []
    for file, *_ in parts:
        try:
            reader = FastReader(file)
        except (ValueError, LookupError, ArithmeticError, MemoryError, struct.error) as error:
            raise CheckpointError(
                f"{file} is not a whole GGUF file ({first_line(error)}): download it again, or "
                "pip install --upgrade gguf if its format is newer"
            ) from error
        fields, tensors = {**reader.fields, **fields}, [*tensors, *reader.tensors]
    model = GgufModel(fields, tensors)
    count = model.value("split.tensors.count", len(tensors))
    if "general.architecture" not in fields or not 0 < len({x.name for x in tensors}) == len(tensors) == count:
        raise CheckpointError(
            f"{parts[0][0]} is not a whole model: {len(parts)} of split.count = {model.value('split.count', 1)} files "
            f"have {len(tensors)} of {count} tensors; give each the name that it was published with, or merge them "
            "with llama-gguf-split --merge"
        )
    return model


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of `GgufModel.tensors` in torch's order, the reverse of ggml's."""
    return tuple(map(int, reversed(tensor.shape)))


def gguf_error(what: str, file: Path, error: Exception) -> CheckpointError:
    """Return the error for a `what` (model, tokenizer) that transformers could not make from a GGUF file."""
    architecture, reason = read_gguf(file).architecture, first_line(error)
    if "architecture" in reason or "model_type" in reason or isinstance(error, KeyError):
        return CheckpointError(
            f"{file} is a {architecture} model, an architecture that transformers does not read from GGUF files: give "
            "the Hugging Face model that it was made from"
        )
    return CheckpointError(f"cannot load a {what} from {file}: {reason}")
