"""The engine of a command is loaded while its compiler is imported."""

import importlib
import sys
import threading

import pytest
import torch

from redrafter.app import loading
from redrafter.app.options import DraftOptions, LoadOptions


@pytest.mark.parametrize(
    ("gpu", "changes", "imported"),
    [
        (True, {}, True),
        (True, {"device": "cuda:1"}, True),
        (True, {"device": "cpu"}, False),
        (True, {"compile": False}, False),
        (False, {}, False),
    ],
)
def test_the_compiler_is_imported_while_weights_are_read(gpu, changes, imported, monkeypatch, tmp_path):
    (tmp_path / "slow_compiler.py").write_text("import threading\nTHREAD = threading.current_thread()\n")
    (tmp_path / "its_processes.py").write_text(
        "import slow_compiler\ndef maybe_warm_pool():\n    slow_compiler.POOL = True"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "COMPILER", "slow_compiler")
    monkeypatch.setattr(loading, "COMPILER_PROCESSES", "its_processes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(loading, "bind", lambda *_, **__: "target")
    monkeypatch.setattr(loading, "Engine", lambda *_: type("Loaded", (), {}))
    monkeypatch.setattr(loading, "default_sampling", lambda model: None)
    loading.load_engine("undrafted", "a-model", LoadOptions(**changes), DraftOptions())
    found, _ = (sys.modules.pop(name, None) for name in ("slow_compiler", "its_processes"))
    assert (found is not None) == imported
    assert found is None or (found.POOL and found.THREAD is not threading.main_thread())


def test_the_compiler_has_a_function_that_starts_its_processes():
    assert callable(importlib.import_module(loading.COMPILER_PROCESSES).maybe_warm_pool)
