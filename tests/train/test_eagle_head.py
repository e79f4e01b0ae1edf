"""Training of EAGLE-3 heads: what is learnt is what is drafted, and what is written goes out and comes back."""

from itertools import count

import pytest
import torch

from helpers.dflash import BLOCK, random_block_drafter
from helpers.eagle import EAGLE_FORMS, plain_logits, random_head
from helpers.models import assert_close_by_scale, tiny_model
from helpers.mtp import random_mtp
from helpers.training import (
    check_every_weight_is_learnt,
    check_resumed_training,
    check_texts_are_apart,
    command,
    known_text,
    learn_circle,
    record,
    refused,
    round_circle,
    trained_logits,
    written,
)
from helpers.training import tiny_model as trained_base
from redrafter import EagleDrafter
from redrafter.cli import main as redrafter
from redrafter.convert.convert_checkpoint import main as convert_main
from redrafter.drafting.text_drafters import ReplayableDrafter, TrainableDrafter, require
from redrafter.errors import UnsupportedError
from redrafter.measure.replay import ValidationTexts
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.train_drafter import main
from redrafter.tree.sizes import TreeShape

DEPTH, LENGTH = 3, 14


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_what_is_trained_is_what_is_drafted(form, model):
    """Compare with a plain recomputation: from the second step on, the head reads hidden states of its own."""
    head = random_head(**EAGLE_FORMS[form])
    text = known_text(head)
    trained = trained_logits(head, model, text)
    for pending in (1, 5, LENGTH - DEPTH - 1):
        committed, drafts = text[0, : pending + 1], text[0, pending + 1 : pending + DEPTH]
        assert_close_by_scale(trained[pending - 1], plain_logits(head, model, committed, drafts), 1e-5)


@pytest.mark.parametrize("form", ["published", "speculators"])
def test_texts_packed_into_a_row_are_apart(form, model):
    check_texts_are_apart(random_head(**EAGLE_FORMS[form]), model)


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_every_weight_is_learnt(form, model):
    check_every_weight_is_learnt(random_head(**EAGLE_FORMS[form]), model)


def test_a_few_steps_of_training_are_worth_many_tokens():
    base = trained_base(vocab=48, initializer_range=0.05, num_hidden_layers=3)
    circle = learn_circle(base, 40)
    config = TrainConfig(form="eagle3", steps=60, draft_len=4, cpu=True, lr=1e-2, log_every=60)
    head = new_drafter(base, config, circle.sort().values)
    texts = ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20)
    before = texts.measure(head, TreeShape(3, 4, 13)).tokens_per_step
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    result = train(base, head, batches, config, log=lambda _: None)
    assert texts.measure(head, TreeShape(3, 4, 13)).tokens_per_step > max(3.5, before)
    assert result.accuracy[3] > 0.8


def test_the_command_makes_a_head_that_loads_goes_out_and_comes_back(tmp_path, capsys):
    words = command(tmp_path, "--form", "eagle3", "--steps", "4", "--draft-vocab-size", "40", "--lr", "1e-2")
    assert main(words) == 0
    base, out = tmp_path / "base", tmp_path / "out"
    assert "drafter of" in capsys.readouterr().out
    head = EagleDrafter.from_pretrained(out)
    assert head.config.target_layers == [0]
    assert head.config.trained_draft_len == 3
    assert "# EAGLE-3 head for base" in (out / "README.md").read_text()
    assert record(tmp_path)["config"]["form"] == "eagle3"
    there = ["--drafter-model-dir", str(out), "--to", "speculators", "--output-dir", str(tmp_path / "theirs")]
    back = ["--drafter-model-dir", str(tmp_path / "theirs"), "--to", "drafter", "--output-dir", str(tmp_path / "back")]
    assert convert_main(there) == convert_main(back) == 0
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        texts, stats = written(base, out, **how)
        again, same = written(base, tmp_path / "back", **how)
        assert torch.equal(texts, again)
        assert (stats.steps, stats.drafted, stats.accepted_by_depth) == (
            same.steps,
            same.drafted,
            same.accepted_by_depth,
        )
    prompts = ["--prompts", str(tmp_path / "data.jsonl"), "--num-prompts", "2", "--new-tokens", "8"]
    evaluated = ["evaluate", "--model", str(base), "--drafter", str(out), *prompts, "--device", "cpu", "--explain"]
    assert redrafter(evaluated) == 0
    assert "tokens per step" in capsys.readouterr().out
    more = [*words[:-8], "--steps", "2", "--drafter", str(out), "--output", str(tmp_path / "more")]
    assert main(more) == 0
    assert "--form is the drafter's own" in refused(capsys, [*more, "--form", "eagle3", "--overwrite"])
    assert main([*words, "--dry-run"]) == 0
    assert "the drafter's states" in capsys.readouterr().out


def test_a_training_that_goes_on_ends_bit_for_bit_where_it_would_have(tmp_path, capsys):
    words = command(tmp_path, "--form", "eagle3", "--save-every", "2", "--validate-prompts", "0")
    check_resumed_training(words, tmp_path, capsys, EagleDrafter)
    assert "was made with --form eagle3" in refused(
        capsys,
        [*command(tmp_path, "--steps", "4"), "--save-every", "2", "--validate-prompts", "0", "--resume", "--overwrite"],
    )


@pytest.mark.parametrize("option", ["--recurrence apple", "--head-rank 8", "--context-window 4"])
def test_options_of_recurrent_drafters_are_refused_by_name(capsys, tmp_path, option):
    words = command(tmp_path, "--form", "eagle3", *option.split())
    assert " is for --form recurrent: leave it out with --form eagle3" in refused(capsys, words)


def test_other_drafters_are_refused_by_name_and_blocks_are_measured(capsys, tmp_path):
    command(tmp_path)  # writes the base and the prompts
    sizes = {"vocab_size": trained_base().config.vocab_size, "target_layers": [0], "mask_token_id": 3}
    random_block_drafter(**sizes).save_pretrained(tmp_path / "blocks")
    evaluate = ["evaluate", "--model", str(tmp_path / "base"), "--drafter", str(tmp_path / "blocks"), "--device", "cpu"]
    evaluate += ["--prompts", str(tmp_path / "data.jsonl"), "--num-prompts", "2", "--new-tokens", "8"]
    assert redrafter([*evaluate, "--explain"]) == 0
    assert f"5x{BLOCK - 1}" in capsys.readouterr().out
    assert redrafter([*evaluate, "--shapes", f"5x{BLOCK}"]) == 2
    assert f"draft_len_per_beam={BLOCK} is more than the {BLOCK - 1} tokens that a block" in capsys.readouterr().err
    for name, interface in (("evaluate", ReplayableDrafter), ("train", TrainableDrafter)):
        with pytest.raises(UnsupportedError, match=f"`redrafter {name}` cannot draft over .* of the kind MTP layer"):
            require(interface, random_mtp(Target(trained_base())))
