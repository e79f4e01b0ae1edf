"""`redrafter train --dry-run --save DIR`: a drafter with random weights to try a pipeline with."""

import json

import pytest
import torch
from huggingface_hub import ModelCard

from helpers.generation import same_undrafted
from helpers.training import command, refused
from redrafter import ReDrafter
from redrafter.convert.config import main as convert
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.train.train_drafter import main


@pytest.mark.parametrize(
    "form",
    [["--draft-vocab-size", "40"], ["--form", "eagle3"], ["--form", "dspark"]],
    ids=["recurrent", "eagle3", "dspark"],
)
def test_a_dry_run_saves_an_untrained_drafter_that_says_so_and_drafts(form, tmp_path, capsys):
    save = tmp_path / "dry"
    assert main(command(tmp_path, *form, "--dry-run", "--save", str(save))) == 0
    assert capsys.readouterr().out.endswith(f"saved {save}, an untrained drafter\n")
    assert not (tmp_path / "out").exists()
    assert main(command(tmp_path, *form, "--steps", "1", "--validate-prompts", "0")) == 0
    dry, trained = (open_drafter_model(place) for place in (save, tmp_path / "out"))
    shapes = [{name: x.shape for name, x in drafter.state_dict().items()} for drafter in (dry, trained)]
    assert shapes[0] == shapes[1]
    assert dry.draft_ids is None or torch.equal(dry.draft_ids, trained.draft_ids)
    assert dry.config.trained_draft_len == 0
    card = ModelCard.load(save / "README.md")
    expected = ["redrafter", "speculative-decoding", *form[1:] * (form[0] == "--form"), "untrained"]
    assert card.data.tags == expected
    assert "**This drafter is not trained**" in card.text
    assert json.loads((save / "training.json").read_text())["steps"] == 0
    with pytest.warns(UserWarning, match="random weights and makes nothing faster"):
        engine = ReDrafter.from_pretrained(tmp_path / "base", save)
    card, merged = tmp_path / "dry" / "README.md", tmp_path / "merged"
    card.unlink()  # the converted drafter's is new
    for to, place in (("drafter", tmp_path / "again"), ("redrafter", merged)):
        words = ["--drafter-model-dir", str(save), "--to", to, "--output-dir", str(place)]
        words += ["--base-model-checkpoint-dir", str(tmp_path / "base")]
        capsys.readouterr()
        assert convert(words) == 0
        assert "note: the drafter is not trained: its weights are random" in capsys.readouterr().err
    assert "**This drafter is not trained**" in (tmp_path / "again" / "README.md").read_text()
    with pytest.warns(UserWarning, match="random weights and makes nothing faster"):
        ReDrafter.from_pretrained(merged)
    same_undrafted(engine, torch.tensor([[1, 30, 40]]), max_new_tokens=12, do_sample=False)
    assert main(command(tmp_path, "--drafter", str(save), "--steps", "1", "--overwrite")) == 0  # trained further
    assert open_drafter_model(tmp_path / "out").config.trained_draft_len == 3


def test_save_is_refused_without_a_dry_run_and_for_a_drafter_that_exists(tmp_path, capsys):
    (tmp_path / "drafter").mkdir()
    for more in ([], ["--dry-run", "--drafter", str(tmp_path / "drafter")]):
        error = refused(capsys, command(tmp_path, *more, "--save", str(tmp_path / "dry")))
        assert "give it with --dry-run and without --drafter; a training writes to --output" in error
    (tmp_path / "dry").mkdir()
    (tmp_path / "dry" / "thesis.txt").write_text("mine")
    assert "--save" in refused(capsys, command(tmp_path, "--dry-run", "--save", str(tmp_path / "dry"), "--overwrite"))
    assert (tmp_path / "dry" / "thesis.txt").read_text() == "mine"
