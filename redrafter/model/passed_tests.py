"""Self-tests that models loaded from files have passed, kept on disk so that the next load need not run them.

A result is found by a digest of everything that may decide it. What is not known to be covered by the digest (a model
that its owner has loaded or changed, other arguments of loading, code from elsewhere, a GPU) is tested each time.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from redrafter.errors import ReDrafterError
from redrafter.files.atomic_file import write_atomically
from redrafter.files.gguf_file import find_gguf, find_parts
from redrafter.files.home import home
from redrafter.files.hub import find_snapshot
from redrafter.model.linear_layers import is_quantized
from redrafter.model.patch import ModelState
from redrafter.model.positions import find_dynamic_rope

MAX_RESULTS = 256  # files that are kept; the ones that were written first are removed
# Arguments of loading that the digest covers, by their values. Others, such as a config or a device map, are objects.
_COVERED = {"attn_implementation": str, "device": object, "dtype": object, "quantization": str, "caller": object}
_OF_NO_EFFECT = {"trust_remote_code": (False,), "tp_size": (1,)}  # where they have these values
_ENVIRONMENT = ("ATEN", "DNNL", "KMP", "MKL", "ONEDNN", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON")
_OWN_CODE = ("redrafter.", "torch.", "transformers.")

_Stamp: TypeAlias = tuple[str, int, int, int, int]


class PassedTests:
    """The self-tests that one model has passed, each with what it has found."""

    def __init__(self, digest: str | None = None):
        """Refer to the results of a digest; None for a model of which none are kept."""
        self._digest = digest

    def find(self, test: str, *names: str) -> dict[str, bool] | None:
        """Return what a test has found, of these names; None unless it was passed and can be read."""
        if self._digest is None:
            return None
        try:
            found = json.loads(self._path(test).read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError, RecursionError):
            return None
        whole = isinstance(found, dict) and found.keys() == set(names)
        return found if whole and all(isinstance(value, bool) for value in found.values()) else None

    def keep(self, test: str, **found: bool) -> None:
        """Keep what a test has found that was passed. Without a folder to write to, nothing is kept."""
        if self._digest is None:
            return
        with suppress(OSError, RuntimeError, ReDrafterError):
            path = self._path(test)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(found))
            newest_first = sorted(path.parent.glob("*.json"), key=lambda file: -file.stat().st_mtime_ns)
            for old in newest_first[MAX_RESULTS:]:
                old.unlink(missing_ok=True)

    def _path(self, test: str) -> Path:
        return home() / "passed-tests" / f"{self._digest}-{test}.json"


NONE_PASSED = PassedTests()


def stamps_of_model(name: str | Path, load: Mapping[str, object]) -> list[_Stamp] | None:
    """Return the stamps of the files of a model; None where these and `load` do not decide what is loaded."""
    unknown = [key for key in load if key not in _COVERED and load[key] not in _OF_NO_EFFECT.get(key, (None,))]
    objects = [key for key in load if not isinstance(load[key], _COVERED.get(key, object) | None)]
    if unknown or objects:
        return None
    if (file := find_gguf(name)) is not None:
        return _stamps(find_parts(file))
    folder = find_snapshot(str(name))
    # The base of an adapter is elsewhere.
    return None if folder is None or (folder / "adapter_config.json").exists() else _stamps(folder.iterdir())


def passed_tests(model: PreTrainedModel, files: list[_Stamp] | None, load: Mapping[str, object]) -> PassedTests:
    """Return the results that are kept of a model that was just loaded from files with these stamps."""
    if files is None:
        return NONE_PASSED
    kinds = sorted({type(module) for module in model.modules()}, key=repr)
    code = {kind.__module__: sys.modules[kind.__module__] for kind in kinds}
    foreign = not all(f"{x.__module__}.".startswith(_OWN_CODE) for kind in kinds for x in (kind, kind.forward))
    state, tensors = ModelState.from_model(model), model.state_dict()
    if (
        foreign
        or is_quantized(model.config)
        or model.device.type != "cpu"
        or state.hooked
        or state.compiled
        or any(name in vars(module) for module in model.modules() for name in ("forward", "_hf_hook"))
        or find_dynamic_rope(model) is not None  # a self-test leaves longer frequencies on the model
    ):
        return NONE_PASSED
    attention = model.config._attn_implementation
    decides = [
        files,
        sorted((key, str(value)) for key, value in load.items() if key != "caller"),
        repr(model.config),
        [attention, repr(getattr(ALL_ATTENTION_FUNCTIONS.get(attention), "__qualname__", None))],
        [(name, str(x.dtype), str(x.device), list(x.shape), list(x.stride())) for name, x in tensors.items()],
        [(kind.__module__, kind.__qualname__) for kind in kinds],
        # Functions that a program has put into a model's file come from other modules.
        [sorted({str(getattr(x, "__module__", "")) for x in vars(module).values()}) for module in code.values()],
        _stamps(Path(str(module.__file__)) for module in code.values()),
        _stamps(Path(__file__).parents[1].rglob("*.py")),
        sorted(
            {file.name for path in sys.path for file in _listed(path) if file.suffix in (".dist-info", ".egg-info")}
        ),
        [sys.version, torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()],
        [platform.machine(), _cpu_flags(), str(torch.get_default_dtype())],
        [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        [torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available()],
        sorted((key, value) for key, value in os.environ.items() if key.startswith(_ENVIRONMENT)),
    ]
    return PassedTests(hashlib.sha256(json.dumps(decides).encode()).hexdigest())


def _stamps(files: Iterable[Path]) -> list[_Stamp]:
    """Return the path, size, time of change, inode and time of its entry of each file, in the order of paths."""
    found = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    return sorted((path, x.st_size, x.st_mtime_ns, x.st_ino, x.st_ctime_ns) for path, x in found)


def _listed(folder: str) -> list[Path]:
    with suppress(OSError):
        return list(Path(folder or ".").iterdir())
    return []


def _cpu_flags() -> list[bool]:
    return [torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()]  # noqa: SLF001
