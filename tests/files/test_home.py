"""Where what was measured and compiled is kept."""

import os
from pathlib import Path

import pytest

from redrafter.files.home import home, keep_kernels


def test_the_home_is_in_the_cache_of_the_user_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.setenv("REDRAFTER_HOME", "")
    assert home() == Path.home() / ".cache" / "redrafter"


@pytest.mark.parametrize("chosen", [None, "/elsewhere"])
def test_compiled_kernels_are_kept_at_home_unless_they_have_a_place(chosen, monkeypatch, tmp_path):
    inductor = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    keep_kernels()
    assert inductor.cache_dir() == (chosen or str(tmp_path / "kernels"))


def test_a_home_that_cannot_be_written_to_leaves_kernels_where_torch_has_them(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_kernels()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
