"""New weights of a model that is loaded already: from a directory or a file of safetensors, or given by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.files.headers import weight_files
from redrafter.files.stored_tensors import SUFFIX, read_safetensors
from redrafter.model.target import Target
from redrafter.model.weights import listed
from redrafter.parallel.local_shards import cut_weights

_WRONG = {"missing": "missing_keys", "unknown": "unexpected_keys"}  # what transformers reports


Weights: TypeAlias = str | Path | Mapping[str, Tensor]


def read_weights(source: Weights, target: Target) -> Mapping[str, Tensor]:
    """Return the weights that a source holds for a target, or this rank's part, by the names of its `state_dict`.

    Files are read whole into memory: what becomes of them later changes nothing.

    Args:
        source: A directory as `save_pretrained` writes it, or with files of safetensors alone; such a file; or the
            weights themselves.
        target: The target that they are for.

    Raises:
        ArgumentError: The source is none of these.
        CheckpointError: A file cannot be read.
        MismatchError: A directory holds an unexpected tensor, lacks one, or has one of another shape.
    """
    if isinstance(source, Mapping):
        return cut_weights(target.model, source) if all(isinstance(x, Tensor) for x in source.values()) else source
    if not isinstance(source, str | Path):
        raise ArgumentError(f"weights are a directory, a file or tensors by name, got {type(source).__name__}")
    path = Path(source)
    try:
        has_config = (path / "config.json").is_file()
        if path.is_dir():
            # Of a model's directory, those that save_pretrained writes: others may be there in other formats.
            files = (has_config and weight_files(path)[0]) or sorted(path.glob(f"*{SUFFIX}"))
        else:
            files = [path] if path.suffix == SUFFIX and path.exists() else []
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not files:
        raise CheckpointError(f"{path} holds no weights: give a {SUFFIX} file, or a directory with some")
    weights = read_safetensors(files)
    cut = cut_weights(target.model, weights)
    own = target.model.state_dict(keep_vars=True)
    if not has_config or cut.keys() <= own.keys():  # tied ones may be left out
        return cut
    return cut_weights(target.model, _renamed(weights, target, path))


def _renamed(weights: Mapping[str, Tensor], target: Target, path: Path) -> Mapping[str, Tensor]:
    """Return weights by the names of a target's modules, which in checkpoints of some architectures have others.

    transformers alone knows these names. It ignores tensors that it does not know, which are refused here.
    """
    # transformers renames and merges checkpoint tensors as it loads, so it loads a second model from them.
    kind: Any = type(target.model)
    try:
        # Tensors of other sizes are named below.
        form = {"config": target.model.config, "dtype": target.dtype, "ignore_mismatched_sizes": True}
        model, info = kind.from_pretrained(None, state_dict=dict(weights), output_loading_info=True, **form)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded as {target.name}: {first_line(error)}") from error
    shapes = sorted(info["mismatched_keys"])
    wrong = [
        *(f"{what} {listed(sorted(info[key]))}" for what, key in _WRONG.items() if info[key]),
        *(f"{name} of shape {tuple(found)} instead of {tuple(wanted)}" for name, found, wanted in shapes),
    ]
    if wrong:
        raise MismatchError(f"{path} has not the weights of {target.name}, and none was written: {'; '.join(wrong)}")
    loaded: dict[str, Tensor] = model.state_dict()
    return loaded
