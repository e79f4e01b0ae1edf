"""The hub, where it cannot be reached: said at once, in one line, with what to do."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from helpers.models import tiny_drafter, tiny_model
from redrafter import CheckpointError, RecurrentDrafter, ReDrafter
from redrafter.files import hub
from redrafter.files.checkpoint_kind import check_source

NOWHERE = "http://127.0.0.1:9"  # where nothing listens
REPOSITORY = "some-org/some-model"


@pytest.fixture
def unreachable(monkeypatch) -> None:
    for module in ("huggingface_hub.constants",):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{module}.ENDPOINT", NOWHERE)
    monkeypatch.setattr(hub, "_reached", set())


def test_a_hub_that_cannot_be_reached_is_asked_once_and_the_error_says_what_to_give(unreachable):
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"{NOWHERE} cannot be reached .* give the directory .*HF_HUB_OFFLINE=1"):
        ReDrafter.from_pretrained(REPOSITORY)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        ReDrafter.from_pretrained(os.curdir, drafter=REPOSITORY)
    assert time.monotonic() - began < hub.CONNECT_SECONDS  # huggingface_hub's own retries take 23 s for each file


def test_a_repository_that_was_downloaded_is_used_offline(unreachable, monkeypatch, tmp_path):
    folder = tmp_path / f"models--{REPOSITORY.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match=f"what was downloaded of {REPOSITORY} is used, as with HF_HUB_OFFLINE=1"):
        check_source(REPOSITORY)
    assert constants.HF_HUB_OFFLINE
    assert Path(str(hub.find_model_file(REPOSITORY, "config.json"))).read_text() == "{}"
    assert hub.find_model_file(REPOSITORY, "redrafter.json") is None


def test_a_repository_of_a_base_is_refused_as_a_drafter_before_its_weights_are_downloaded(monkeypatch, tmp_path):
    tiny_model("llama").config.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.extend(allow_patterns) or str(tmp_path)
    )
    with pytest.raises(CheckpointError, match="a model, not a drafter"):
        RecurrentDrafter.from_pretrained(REPOSITORY)
    assert asked == ["*.json"]


def test_a_drafter_in_a_folder_of_a_repository_is_downloaded(monkeypatch, tmp_path):
    saved = tiny_drafter()
    saved.save_pretrained(tmp_path / "drafter")
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.append(allow_patterns) or str(tmp_path)
    )
    loaded = RecurrentDrafter.from_pretrained(REPOSITORY, subfolder="drafter")
    assert asked[-1] == ["drafter/*.json", "drafter/*.safetensors"]
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in saved.state_dict().items())


def test_offline_the_error_says_so():
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set, so that nothing is downloaded: give a directory"):
        ReDrafter.from_pretrained(REPOSITORY)


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_command_says_it_in_one_line_before_torch_is_imported(command, tmp_path):
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from redrafter.cli import main; "
        f"sys.exit(main([{command!r}, *sys.argv[1:]]))"
    )
    words = [REPOSITORY] if command == "serve" else ["--model", REPOSITORY, "ja"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "HF_HUB_OFFLINE" in done.stderr
