"""What is saved has the mode that the umask asks for, so that a group can share it; captured rows stay private."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.conversion import apple_dir, convert
from helpers.models import tiny_drafter, tiny_model
from helpers.training import command
from redrafter import EagleConfig, EagleDrafter
from redrafter.cli import main
from redrafter.files.atomic_file import write_atomically
from redrafter.serve.capture import prepare_folder

UMASK = 0o027


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    old = os.umask(UMASK)
    yield
    os.umask(old)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of all files of a folder; links to the files of a base keep theirs."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_nlink == 1]
    assert files
    return {str(file.relative_to(folder)): stat.S_IMODE(file.stat().st_mode) for file in files}


def all_shared(folder: Path) -> bool:
    found = modes(folder)
    assert set(found.values()) == {0o666 & ~UMASK}, found
    return True


def test_saved_drafters_have_the_umasks_mode(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "recurrent")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    EagleDrafter(EagleConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "eagle")
    assert all_shared(tmp_path)


def test_what_train_and_regenerate_write_has_the_umasks_mode(tmp_path):
    (tmp_path / "made").mkdir()
    words = command(tmp_path, "--steps", "2", "--save-every", "1", "--validate-every", "1", "--validate-prompts", "1")
    words[words.index("--output") + 1] = str(tmp_path / "made" / "drafter")
    assert main(["train", *words]) == 0
    base, data = str(tmp_path / "base"), str(tmp_path / "data.jsonl")
    own = ["--data", data, "--output", str(tmp_path / "made" / "own.jsonl"), "--max-new-tokens", "4"]
    assert main(["regenerate", "--model", base, "--device", "cpu", *own]) == 0
    names = modes(tmp_path / "made")
    assert {"own.jsonl", "drafter/model.safetensors", "drafter/training.json"} <= names.keys()
    assert any(name.endswith("optimizer.pt") for name in names)
    assert all_shared(tmp_path / "made")


def test_checkpoints_in_each_format_have_the_umasks_mode(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    pair = {"base": tmp_path / "base", "drafter": apple_dir(tmp_path / "apple")}
    for name in ("redrafter", "trtllm"):
        convert(tmp_path / "made" / name, **pair, to=name)
    for name in ("apple", "drafter"):
        convert(tmp_path / "made" / name, drafter=pair["drafter"], to=name)
    convert(tmp_path / "made" / "copied", **pair, copy=True)
    assert all_shared(tmp_path / "made")


def test_files_have_the_umasks_mode_and_captured_rows_are_private(tmp_path):
    write_atomically(tmp_path / "report.json", "{}")
    assert all_shared(tmp_path)
    prepare_folder(str(tmp_path / "captured"))
    assert stat.S_IMODE((tmp_path / "captured").stat().st_mode) == 0o700
