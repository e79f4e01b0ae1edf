"""Merging a base and a drafter: what is written, what is refused, and that nothing half-written is left."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import redrafter.cli
from helpers.command_line import fails, merge
from helpers.conversion import words
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model
from redrafter import ArgumentError, CheckpointError, MismatchError, ReDrafter
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.convert.checks import describe
from redrafter.convert.convert_checkpoint import main
from redrafter.tree.sizes import TreeShape


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with `base`, in several files as large models are, and `drafter`."""
    folder = tmp_path_factory.mktemp("convert")
    model = tiny_model("llama")
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    (folder / "base" / "tokenizer.json").write_text("{}")
    (folder / "base" / "additional_chat_templates").mkdir()
    (folder / "base" / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (folder / "base" / ".cache").mkdir()
    norms = embedding_norms(model.get_input_embeddings().weight)
    tiny_drafter(draft_beams=3, draft_vocab_size=50, base_embedding_norms=norms).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def copies(saved, tmp_path) -> Path:
    """Return a copy of the folder `saved` that a test may damage."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def arguments(folder: Path, output: Path, *more: str) -> list[str]:
    """Return the words of a command line that merges the pair in a folder."""
    return [*words(base=folder / "base", drafter=folder / "drafter", output=output), *more]


def test_merged_pair_generates_as_its_parts(saved, tmp_path, capsys):
    output = tmp_path / "deep" / "merged"
    assert main([*arguments(saved, output), "--node_budget", "7"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    pair, parts = ReDrafter.from_pretrained(output), ReDrafter.from_pretrained(saved / "base", saved / "drafter")
    assert (pair.proposer.beams, pair.proposer.depth, pair.proposer.nodes) == (3, 5, 7)
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(pair.generate(prompt, max_new_tokens=20), parts.generate(prompt, max_new_tokens=20))
    for mine, theirs in zip(pair.drafter.parameters(), parts.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_merged_drafter_reads_the_text_as_it_did(saved, tmp_path):
    drafter = tiny_drafter(context_window=7, context_head_dim=8)
    drafter.save_pretrained(tmp_path / "drafter")
    output = merge(saved / "base", tmp_path / "drafter", tmp_path / "merged", TreeShape(num_beams=4))
    found = ReDrafter.from_pretrained(output).drafter
    assert found.config.context_window == describe(str(output))["drafter"]["context_window"] == 7
    assert all(torch.equal(weight, drafter.get_parameter(name)) for name, weight in found.named_parameters())


def test_base_files_are_as_they_were(saved, tmp_path):
    output = merge(saved / "base", saved / "drafter", tmp_path / "merged", TreeShape(num_beams=4))
    for file in (saved / "base").rglob("*"):
        if file.is_file():
            assert (output / file.relative_to(saved / "base")).read_bytes() == file.read_bytes()
            assert (output / file.relative_to(saved / "base")).samefile(file) == (file.suffix == ".safetensors")
    assert len(list(output.glob("*.safetensors"))) > 1
    assert not (output / ".cache").exists()
    assert {file.name for file in (output / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((output / "redrafter.json").read_text()) == {
        "num_beams": 4,
        "draft_len_per_beam": 5,
        "node_budget": None,
        "greedy_search": None,
    }
    assert list(tmp_path.iterdir()) == [output]


def test_weights_behind_symbolic_links_are_linked_themselves(saved, tmp_path):
    (tmp_path / "base").mkdir()
    for file in (saved / "base").iterdir():
        (tmp_path / "base" / file.name).symlink_to(file)
    output = merge(tmp_path / "base", saved / "drafter", tmp_path / "merged")
    assert not any(file.is_symlink() for file in output.rglob("*"))


def test_weights_are_copied_where_links_do_not_work(saved, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    output = merge(saved / "base", saved / "drafter", tmp_path / "merged")
    for file in (saved / "base").glob("*.safetensors"):
        assert (output / file.name).read_bytes() == file.read_bytes()
        assert not (output / file.name).samefile(file)


def test_an_existing_output_is_replaced_only_when_asked(saved, tmp_path):
    output = merge(saved / "base", saved / "drafter", tmp_path / "merged")
    (output / "old").touch()
    with pytest.raises(ArgumentError, match="--overwrite"):
        merge(saved / "base", saved / "drafter", output)
    assert (output / "old").exists()
    merge(saved / "base", saved / "drafter", output, TreeShape(num_beams=2), overwrite=True)
    assert not (output / "old").exists()
    assert json.loads((output / "redrafter.json").read_text())["num_beams"] == 2
    assert list(tmp_path.iterdir()) == [output]


def test_overwrite_spares_what_is_no_merged_checkpoint(copies):
    (copies / "precious").mkdir()
    (copies / "precious" / "config.json").write_text("{}")
    for output in (copies / "precious", copies / "base", copies / "base" / "merged", copies):
        with pytest.raises(ArgumentError):
            merge(copies / "base", copies / "drafter", output, overwrite=True)
        assert (copies / "base" / "config.json").exists()
    assert (copies / "precious" / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": HIDDEN + 1}, f"of {HIDDEN + 1}, but .* has {HIDDEN}; its base is elsewhere"),
        ({"vocab_size": VOCAB + 1}, f"of {VOCAB + 1}, but .* has {VOCAB}; its base is elsewhere"),
        ({"base_embedding_norms": [1.0] * 8}, "another base than"),
    ],
    ids=["hidden size", "vocabulary", "embedding norms"],
)
def test_a_drafter_of_another_base_is_refused(copies, changes, says):
    tiny_drafter(**changes, base_model="elsewhere").save_pretrained(copies / "other")
    with pytest.raises(MismatchError, match=says):
        merge(copies / "base", copies / "other", copies / "merged")
    assert not (copies / "merged").exists()


@pytest.mark.parametrize("part", ["base", "drafter"])
def test_broken_files_are_named(copies, part):
    weights = sorted((copies / part).glob("*.safetensors"))[-1]
    whole = weights.read_bytes()
    for damaged in (whole[:-10], whole[:5], b"", b"x" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(weights))):
            merge(copies / "base", copies / "drafter", copies / "merged")
    weights.unlink()
    with pytest.raises(CheckpointError, match=re.escape(weights.name)):
        merge(copies / "base", copies / "drafter", copies / "merged")
    (copies / part / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=re.escape(str(copies / part / "config.json"))):
        merge(copies / "base", copies / "drafter", copies / "merged")


def test_nothing_is_left_when_writing_fails(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    output = merge(saved / "base", saved / "drafter", tmp_path / "merged")
    for step in (
        "redrafter.convert.plan.write_safetensors",
        "redrafter.convert.plan.link_or_copy",
        "redrafter.files.atomic_folder.sync_to_disk",
    ):
        monkeypatch.setattr(step, full)
        for target in (output, tmp_path / "new"):
            with pytest.raises(CheckpointError, match=rf"{target}: No space.*; free some space"):
                merge(saved / "base", saved / "drafter", target, TreeShape(3), overwrite=True)
        monkeypatch.undo()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [output]
    ReDrafter.from_pretrained(output)


def test_mistakes_are_one_line_and_exit_2(saved, tmp_path, capsys):
    output, swapped = tmp_path / "merged", words(base=saved / "drafter", drafter=saved / "base")
    for args, says in (
        (arguments(saved, output, "--redrafter_num_beams", "51"), "num_beams=51"),
        (arguments(saved, output, "--redrafter_num_beams", "0"), "num_beams"),
        (arguments(saved, output, "--redrafter_num_beams", "many"), "many"),
        (arguments(saved, output, "--nope"), "--nope"),
        (arguments(tmp_path, output), "is not a directory"),
        ([], "nothing to convert"),
        (arguments(saved, output)[:-2], "--output-dir is required"),
        ([*swapped, "--output-dir", str(output)], "not a drafter"),
    ):
        assert says in fails(capsys, "convert", *args)
    assert not output.exists()
    assert redrafter.cli.main(["convert", *arguments(saved, output)]) == 0
    assert (output / "redrafter.json").is_file()
