"""Self-tests that models loaded from files have passed, kept on disk so that the next load need not run them.

A result is found by a digest of what decides it: files, arguments of loading, config, classes, code and versions. What
the digest may not cover (a model that its owner has loaded or changed, other arguments of loading, code from elsewhere,
a GPU) is tested each time.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from transformers import PreTrainedModel

from redrafter.files.gguf_file import find_gguf, find_parts
from redrafter.files.home import KeptResults
from redrafter.files.hub import find_snapshot
from redrafter.files.regular_file import Stamp, stamp_of
from redrafter.model.linear_layers import is_quantized
from redrafter.model.patch import ModelState
from redrafter.model.positions import find_dynamic_rope

RESULTS = KeptResults("passed-tests.json")
# Arguments of loading that the digest covers, by their values. Others, such as a config or a device map, are objects.
_COVERED = {"attn_implementation": str, "device": object, "dtype": object, "quantization": str, "caller": object}
_OF_NO_EFFECT = {"trust_remote_code": (False,), "tp_size": (1,)}  # where they have these values
_ENVIRONMENT = ("ATEN", "DNNL", "KMP", "MKL", "ONEDNN", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON")
_OWN_CODE = ("redrafter.", "torch.", "transformers.")

_Stamps: TypeAlias = list[tuple[str, Stamp]]  # of files, by their paths


class PassedTests:
    """The self-tests that one model has passed, each with its result."""

    def __init__(self, digest: str | None = None):
        """Refer to the results of a digest; None for a model of which none are kept."""
        self._digest = digest

    def find(self, test: str, *names: str) -> dict[str, bool] | None:
        """Return what a test has found, of these names; None unless it was passed and can be read."""
        found = self._all().get(test)
        right = isinstance(found, dict) and found.keys() == {*names} and {bool} >= {*map(type, found.values())}
        return found if right else None

    def keep(self, test: str, **found: bool) -> None:
        """Keep what a test has found that was passed. Without a folder to write to, nothing is kept."""
        if self._digest is not None:
            RESULTS.write(self._digest, self._all() | {test: found})

    def _all(self) -> dict[str, Any]:
        tests = None if self._digest is None else RESULTS.read_all().get(self._digest)
        return tests if isinstance(tests, dict) else {}


NONE_PASSED = PassedTests()


def stamps_of_model(name: str | Path, load: Mapping[str, object]) -> _Stamps | None:
    """Return the stamps of the files of a model; None where these and `load` do not determine the model."""
    unknown = [key for key in load if key not in _COVERED and load[key] not in _OF_NO_EFFECT.get(key, (None,))]
    objects = [key for key in load if not isinstance(load[key], _COVERED.get(key, object) | None)]
    if unknown or objects:
        return None
    if (file := find_gguf(name)) is not None:
        return _stamps(find_parts(file))
    folder = find_snapshot(str(name))
    # The base of an adapter is elsewhere.
    return None if folder is None or (folder / "adapter_config.json").exists() else _stamps(folder.iterdir())


def passed_tests(model: PreTrainedModel, files: _Stamps | None, load: Mapping[str, object]) -> PassedTests:
    """Return the results that are kept of a model that was just loaded from files with these stamps."""
    if files is None:
        return NONE_PASSED
    kinds = sorted({type(module) for module in model.modules()}, key=repr)
    foreign = not all(f"{x.__module__}.".startswith(_OWN_CODE) for kind in kinds for x in (kind, kind.forward))
    state = ModelState.from_model(model)
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
    code = {Path(str(sys.modules[kind.__module__].__file__)) for kind in kinds}
    decides = [
        files,
        sorted((key, str(value)) for key, value in load.items() if key != "caller"),
        [repr(model.config), str(model.config._attn_implementation)],
        [repr(kind) for kind in kinds],
        _stamps([*code, *Path(__file__).parents[1].rglob("*.py")]),
        [sys.version, torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()],
        [str(torch.get_default_dtype()), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled],
        sorted((key, value) for key, value in os.environ.items() if key.startswith(_ENVIRONMENT)),
    ]
    return PassedTests(RESULTS.digest(decides))


def _stamps(files: Iterable[Path]) -> _Stamps:
    """Return the path and the stamp of each file, in the order of paths."""
    return sorted((str(file.absolute()), stamp_of(file.stat())) for file in files if file.is_file())
