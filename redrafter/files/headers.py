"""Names, shapes and number formats of the tensors of a directory, from the headers of its safetensors files.

Nothing here imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from redrafter.errors import CheckpointError, first_line
from redrafter.files.checkpoint_kind import read_json
from redrafter.files.regular_file import open_regular

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Number formats by their codes in a file, from https://github.com/huggingface/safetensors, "Format".
DTYPE_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
}


class Header(NamedTuple):
    """A tensor's entry in the header of a file."""

    file: Path
    shape: tuple[int, ...]
    code: str  # number format; a key of `DTYPE_NAMES`, where it is known here


def weight_files(directory: Path) -> tuple[list[Path], set[str]]:
    """Return the files of safetensors that `save_pretrained` wrote into a directory, none where there are none.

    Returns:
        The files, and the names of the tensors that their index lists, if they have one.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        whole = directory / WEIGHTS_FILE
        # Also a path that is no regular file, which is refused by name later.
        return [whole] if whole.exists() else [], set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of that directory")
    return [directory / name for name in sorted(set(weight_map.values()))], set(weight_map)


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the headers of a directory that `save_pretrained` wrote: of one file, or of several and an index.

    Raises:
        CheckpointError: There are none, or not all of them, or several files hold a tensor of one name, of which
            transformers would take the last one, whichever the index names.
    """
    files, indexed = weight_files(directory)
    if not files:
        raise CheckpointError(f"{directory} has no {WEIGHTS_FILE}; save the model with save_pretrained")
    tensors: dict[str, Header] = {}
    for file in files:
        found = read_file_headers(file)
        if twice := tensors.keys() & found.keys():
            name = min(twice)
            raise CheckpointError(
                f"{file} holds {name}, which {tensors[name].file.name} holds too, and transformers would load one of "
                "them whichever the index names: save the model again with save_pretrained"
            )
        tensors |= found
    if missing := indexed - tensors.keys():
        raise CheckpointError(f"{directory / INDEX_FILE} names tensors that no file has: {min(missing)}")
    return tensors


def read_file_headers(file: Path) -> dict[str, Header]:
    """Return the headers of the tensors of a safetensors file by their names, in the order of their data."""
    with open_safetensors(file, "np") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
        return {name: Header(file, tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}


@contextmanager
def open_safetensors(file: Path, framework: str) -> Iterator[safe_open]:
    """Open a safetensors file, and check that its header describes all of it.

    Raises:
        CheckpointError: It is no regular file, or broken.
    """
    with open_regular(file):  # safetensors would wait for a FIFO's writer
        pass
    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        message = f"{file} cannot be read: it is cut short or not a safetensors file: {first_line(error)}"
        raise CheckpointError(message) from error
