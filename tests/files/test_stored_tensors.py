"""Checkpoints are read whole from regular files, and what is wrong with a file is said by its name."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from redrafter import CheckpointError
from redrafter.files import stored_tensors
from redrafter.files.checkpoint_kind import read_json
from redrafter.files.dtype_names import SAFETENSORS_DTYPES
from redrafter.files.stored_tensors import read_directory, read_safetensors

ONES = torch.ones(3, 4)


def of_every_dtype() -> dict[str, torch.Tensor]:
    made = {code: (torch.arange(12).reshape(3, 4) % 2).to(dtype) for code, dtype in SAFETENSORS_DTYPES.items()}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}


def written(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with a header of ours."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def entry(
    dtype: str = "F32", shape: tuple[object, ...] = (2,), offsets: tuple[object, ...] = (0, 8)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_those_that_safetensors_reads(tmp_path):
    path = tmp_path / "all.safetensors"
    save_file(of_every_dtype(), path, {"format": "pt"})
    found, expected = read_safetensors([path]), load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_tensor_may_begin_at_any_byte(tmp_path):
    data = b"\1" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    header = {"a": entry("U8", (1,), (0, 1)), "b": entry(offsets=(1, 9))}
    found = read_safetensors([written(tmp_path / "odd.safetensors", header, data)])
    assert found["b"].tolist() == [1.5, -2.0]


def test_what_becomes_of_a_file_later_changes_no_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 20)}, path)
    [tensor] = read_safetensors([path]).values()
    assert str(path) not in Path("/proc/self/maps").read_text(), "its end would end this process"
    os.truncate(path, 100)
    assert tensor.eq(1).all()


@pytest.mark.parametrize("kind", ["FIFO", "device", "directory", "link to a FIFO"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    told: list[str] = []

    def read() -> None:
        for what in (lambda: read_directory(tmp_path), lambda: read_safetensors([path]), lambda: read_json(path)):
            with pytest.raises(CheckpointError) as raised:
                what()
            told.append(str(raised.value))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(300)
    assert len(told) == 3, "it waits for somebody who writes"
    assert all("model.safetensors cannot be read" in message for message in told)


@pytest.mark.parametrize("left", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, left):
    path = tmp_path / "model.safetensors"
    save_file({"a": ONES, "b": ONES.clone()}, path)
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with pytest.raises(CheckpointError, match="cut short or not a safetensors file"):
        read_safetensors([path])


@pytest.mark.parametrize(
    ("header", "data", "told"),
    [
        (b"{", b"", "invalid JSON in header"),
        (b"[" * 100_000, b"", "invalid JSON in header"),
        ([], b"", "invalid JSON in header"),
        ({"a": {"dtype": "F32"}}, b"", "missing field `shape`"),
        ({"a": entry(shape=(-2,))}, b"", "invalid value: integer `-2`"),
        ({"a": entry(offsets=(0, 8, 9))}, b"", "invalid JSON in header"),
        ({"a": entry(offsets=(0, "8"))}, b"", "invalid JSON in header"),
        ({"a": entry("F4", (16,))}, bytes(8), "holds a as F4, which is not known here"),
        ({"a": entry(shape=(3,))}, bytes(8), "invalid shape, data type, or offset for tensor"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "invalid offset for tensor `b`"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": entry()}, bytes(9), "not fully covered"),
        ({"a": entry(shape=(1 << 40,), offsets=(0, 1 << 42))}, bytes(8), "not fully covered"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, header, data, told):
    with pytest.raises(CheckpointError, match=told):
        read_safetensors([written(tmp_path / "model.safetensors", header, data)])


def rewrite(path: Path) -> None:
    save_file({"a": ONES * 2}, path)


def replace(path: Path) -> None:
    save_file({"a": ONES * 2}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("change", [rewrite, replace, os.remove, lambda path: os.truncate(path, 50)])
def test_files_that_change_before_all_are_read_are_refused(tmp_path, monkeypatch, change: Callable[[Path], None]):
    """Else some tensors would be of the old checkpoint and some of the new one."""
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for name, path in zip("ab", files, strict=True):
        save_file({name: ONES}, path)
    read = stored_tensors._read_tensors  # noqa: SLF001

    def read_and_change(path: Path, *rest: object) -> dict[str, torch.Tensor]:
        if path == files[1]:
            change(files[0])
        return read(path, *rest)

    monkeypatch.setattr(stored_tensors, "_read_tensors", read_and_change)
    with pytest.raises(CheckpointError, match=r"1\.safetensors was changed while it was read"):
        read_safetensors(files)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    parse = stored_tensors.read_file_headers

    def parse_and_truncate(path: Path) -> object:
        headers = parse(path)
        os.truncate(path, 2000)
        return headers

    monkeypatch.setattr(stored_tensors, "read_file_headers", parse_and_truncate)
    with pytest.raises(CheckpointError, match="became fewer while it was read"):
        read_safetensors([path])


def test_a_tensor_of_two_files_and_a_file_larger_than_memory_are_refused(tmp_path, monkeypatch):
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path in files:
        save_file({"a": ONES}, path)
    with pytest.raises(CheckpointError, match=r"2\.safetensors holds a, which another file"):
        read_safetensors(files)
    monkeypatch.setattr(stored_tensors.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10}))
    with pytest.raises(CheckpointError, match="of the machine's memory are free"):
        read_safetensors(files[:1])


def test_a_directory_is_read_as_save_pretrained_wrote_it(tmp_path):
    save_file({"a": ONES}, tmp_path / "model-1.safetensors")
    save_file({"other": ONES}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert read_directory(tmp_path).keys() == {"a"}
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="names tensors that no file has: b"):
        read_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file of that directory"):
        read_directory(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        read_directory(tmp_path)
    save_file({"c": ONES}, tmp_path / "model.safetensors")
    assert read_directory(tmp_path).keys() == {"c"}
