"""Where what was measured and compiled is kept."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from redrafter.files.home import KeptResults, home, keep_kernels
from redrafter.kernels.cpu import compiled


def test_the_home_is_in_the_cache_of_the_user_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.setenv("REDRAFTER_HOME", "")
    assert home() == Path.home() / ".cache" / "redrafter"


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_compiled_kernels_are_kept_at_home_unless_they_have_a_place(chosen, monkeypatch, tmp_path):
    inductor = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # restored at the end, also if it was not set
        monkeypatch.delenv(name)
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / chosen))
    keep_kernels()
    kept = str(tmp_path / (chosen or "kernels"))
    assert inductor.cache_dir() == kept
    # torch.compile sets the variable to this folder at a time of its own: kernels before and after must be in one.
    assert inductor.triton_cache_dir(0) == os.environ["TRITON_CACHE_DIR"] == f"{kept}/triton"


def test_a_folder_for_tritons_kernels_is_left_as_it_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_a_home_that_cannot_be_written_to_leaves_kernels_where_torch_has_them(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path / "file"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    keep_kernels()
    assert not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} & os.environ.keys()


@pytest.mark.skipif(not any(map(shutil.which, compiled.COMPILERS)), reason="needs a C compiler")
def test_pipes_in_the_home_are_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    compiled.load_library(source)
    (tmp_path / "kernels").mkdir(exist_ok=True)
    for file in [*(tmp_path / "kernels").iterdir(), tmp_path / "results.json"]:
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    compiled.load_library.cache_clear()

    def use() -> None:
        results = KeptResults("results.json")
        results.write("a", 1)
        assert results.read_all() == {}
        compiled.load_library(source)
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(15)
    assert done
