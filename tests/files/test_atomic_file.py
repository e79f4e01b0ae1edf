"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from redrafter import ArgumentError
from redrafter.files.atomic_file import check_writable, write_atomically


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "a.json"
    with pytest.raises(ArgumentError, match="No such file"):
        check_writable(path, "--json")
    path.parent.mkdir()
    check_writable(path, "--json")
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["a.json"]


def test_writers_of_one_process_id_do_not_write_into_each_others_file(tmp_path, monkeypatch):
    """Threads share a process id, and so may processes of containers that share a folder."""
    path, replace, between = tmp_path / "a.json", Path.replace, ["two"]

    def replaced(temporary, target):
        if between:
            write_atomically(path, between.pop())
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(path, "one")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_keeps_pointing(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe, "--json")
    write_atomically(pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert pipe.is_fifo()
    os.close(reader)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has such a device")
def test_a_device_that_takes_nothing_is_refused_in_our_words():
    with pytest.raises(ArgumentError, match="cannot write /dev/full: No space left"):
        write_atomically(Path("/dev/full"), "text")


@pytest.mark.parametrize("name", ["", ".", "folder", "file/below"])
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ArgumentError, match="--out"):
        check_writable(Path(name), "--out")
    with pytest.raises(ArgumentError):
        write_atomically(Path(name), "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"
