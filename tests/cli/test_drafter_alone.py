"""A drafter given as the model: commands find its base from its config or its model card, and name both."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from helpers.command_line import fails, ran
from helpers.dflash import published_dir, random_block_drafter
from helpers.eagle import eagle_dir, random_head, speculators_dir
from helpers.generation import same_undrafted
from helpers.models import tiny_model
from redrafter import CheckpointError, ReDrafter
from redrafter.app.loading import Pair

CARD = "---\nbase_model:\n- {base}\ntags:\n- eagle3\n---\n\n# A head\n"


@pytest.fixture
def alone(folder, tmp_path) -> Path:
    """A folder with a base, and a drafter whose config has the last part of its base's path."""
    (tmp_path / "base").symlink_to(folder / "base")
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | {"base_model": "base"}))
    return tmp_path


def cached(cache: Path, name: str, source: Path) -> None:
    """Put a directory into the hub's cache as the repository of a name."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(source, folder / "snapshots" / "abc")


def served(capsys, model: object) -> tuple[str, str]:
    """Return the model and the drafter that `redrafter serve` would load."""
    code, out, err = ran("serve", str(model), "--print-config")
    assert code == 0, err
    assert "is a drafter (" in err
    config = json.loads(out)
    return config["model"], config["drafter"]


def test_a_drafter_alone_writes_what_it_writes_with_its_base_given(alone):
    words = ["--max-new-tokens", "12", "Once"]
    given = ran("generate", "--model", str(alone / "base"), "--drafter", str(alone / "drafter"), *words)
    code, out, err = ran("generate", "--model", str(alone / "drafter"), *words)
    assert (code, out) == given[:2] == (0, given[1])
    assert f"note: {alone}/drafter is a drafter for {alone}/base, as its config.json says" in err


@pytest.mark.parametrize("command", ["chat", "generate", "bench", "evaluate"])
def test_every_command_that_loads_a_pair_finds_the_base(command, alone, monkeypatch, capsys):
    def load(options: SimpleNamespace, *others: object) -> None:
        raise CheckpointError(f"loads {options.model} and {options.drafter}")

    monkeypatch.setattr(Pair, "load", load)
    _, _, err = ran(command, "--model", str(alone / "drafter"), *(["ja"] if command == "generate" else []))
    assert f"loads {alone}/base and {alone}/drafter" in err


@pytest.mark.parametrize("kind", ["speculators", "EAGLE", "DFlash"])
def test_the_base_is_found_in_the_config_or_in_the_card(kind, alone, capsys):
    place, base = alone / "theirs", str(alone / "base")
    if kind == "speculators":
        speculators = {"algorithm": "eagle3", "verifier": {"name_or_path": base, "architectures": []}}
        speculators_dir(place, random_head(), speculators_config=speculators)
    else:
        eagle_dir(place, random_head()) if kind == "EAGLE" else published_dir(place, random_block_drafter(), "zlab")
        (place / "README.md").write_text(CARD.format(base=base))
    assert served(capsys, place) == (base, str(place))


def test_a_base_that_is_not_named_or_not_found_is_said_with_what_to_type(alone, capsys):
    place = eagle_dir(alone / "theirs", random_head())
    for card in ("", "# no header", "---\nbase_model: [a/b, c/d]\n---\n", "---\n: : [\n---\n"):
        (place / "README.md").write_text(card)
        error = fails(capsys, "serve", str(place), "--print-config")
        assert f"{place} is a drafter, not a model, and names no base in config.json or README.md" in error
        assert f"as its drafter: --drafter {place}" in error
    (place / "README.md").write_text("---\nbase_model: some-org/gone\n---\n")
    error = fails(capsys, "serve", str(place), "--print-config")
    assert "the base that its README.md names, some-org/gone, is neither a directory here nor a repository" in error


def test_a_card_that_would_take_long_to_parse_is_not_read(alone, capsys):
    place = eagle_dir(alone / "theirs", random_head())
    (place / "README.md").write_text("---\nbase_model: base\n" + "key: [1, 2, 3]\n" * 80_000 + "---\n")
    began = time.process_time()
    assert "names no base in config.json or README.md" in fails(capsys, "serve", str(place), "--print-config")
    assert time.process_time() - began < 2


def test_a_drafter_is_not_the_model_where_another_method_drafts(alone, capsys):
    for other in (["--drafter", str(alone / "drafter")], ["--prompt-lookup"], ["--draft-model", str(alone / "base")]):
        assert "is a drafter, not a model: give" in fails(capsys, "serve", str(alone / "drafter"), *other)


def test_repositories_of_the_hub_name_their_base_too(alone, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    head = speculators_dir(tmp_path / "head", random_head())  # its verifier is some/base
    cached(cache, "some/head", head)
    cached(cache, "some/base", alone / "base")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    assert served(capsys, "some/head") == ("some/base", "some/head")
    engine = ReDrafter.from_pretrained(tiny_model("llama"), "some/head")  # in another project's format
    same_undrafted(engine, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)
