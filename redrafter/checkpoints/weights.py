"""New weights of a model that is loaded already: from a directory or a file of safetensors, or given by name."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from redrafter.checkpoints.models import load_model
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.dtype_names import dtype_name
from redrafter.model.target import Target

SUFFIX = ".safetensors"


def read_weights(source: "str | Path | Mapping[str, Tensor]", target: Target) -> Mapping[str, Tensor]:
    """Return the weights that a source holds for a target, by the names of its model's `state_dict`.

    Args:
        source: A directory as `save_pretrained` writes it, or with files of safetensors alone; such a file; or the
            weights themselves.
        target: The target that they are for.

    Raises:
        ArgumentError: The source is none of these.
        CheckpointError: A file cannot be read.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise ArgumentError(f"weights are a directory, a file or tensors by name, got {type(source).__name__}")
    path = Path(source)
    try:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.is_file() else []
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not files or files[0].suffix != SUFFIX:
        raise CheckpointError(
            f"{path} holds no weights: give a {SUFFIX} file, or a directory of this machine with some"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from error
    if _same_names(weights, target.model) or not (path / "config.json").is_file():
        return weights
    # Checkpoints of some architectures have other names than the modules, which transformers alone knows.
    model = load_model(path, dtype=dtype_name(target.dtype), device="cpu", trust_remote_code=False)
    loaded: dict[str, Tensor] = model.state_dict()
    return loaded


def _same_names(weights: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Tell whether weights have the names of a model's own; tied ones may be left out."""
    own = model.state_dict(keep_vars=True)
    return weights.keys() <= own.keys()
