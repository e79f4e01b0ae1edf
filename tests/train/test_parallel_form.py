"""Training of parallel drafters: what is learnt is what is drafted."""

from itertools import count

import pytest
import torch

from helpers.models import assert_close_by_scale, tiny_model
from helpers.parallel import BLOCK, PARALLEL_FORMS, plain_logits, random_parallel_drafter
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
from redrafter import ParallelDrafter
from redrafter.cli import main as redrafter
from redrafter.drafting import parallel
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.evaluate.replay import ValidationTexts
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.teacher import Teacher
from redrafter.train.train_drafter import main
from redrafter.tree.sizes import TreeShape

LENGTH = 14


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize("form", PARALLEL_FORMS)
def test_what_is_trained_is_what_is_drafted(form, model):
    drafter = random_parallel_drafter(**PARALLEL_FORMS[form])
    text = known_text(drafter)
    depth = BLOCK if form == "bidirectional" else BLOCK - 1
    trained = trained_logits(drafter, model, text, depth=depth)
    with Teacher(model, drafter.config.target_layers) as teacher:
        read = teacher.read_batch(text)
    for last in (0, 3, LENGTH - depth - 1):
        embedding = read.embedding[0, : last + 1 + depth]
        expected = plain_logits(drafter, read.hidden[0, : last + 1], *embedding.tensor_split([last + 2]))
        assert_close_by_scale(trained[last], expected[:depth], 1e-5)


@pytest.mark.parametrize("form", ["recurrent", "sliding"])
def test_texts_packed_into_a_row_are_apart(form, model):
    check_texts_are_apart(random_parallel_drafter(**PARALLEL_FORMS[form]), model)


@pytest.mark.parametrize("form", PARALLEL_FORMS)
def test_every_weight_is_learnt(form, model):
    check_every_weight_is_learnt(random_parallel_drafter(**PARALLEL_FORMS[form]), model, BLOCK)


@pytest.mark.parametrize(("head", "serial"), [("recurrent", 1), ("markov", 0), ("none", 0)])
def test_only_the_recurrence_of_a_head_is_computed_step_by_step(head, serial, model, monkeypatch):
    products, compute = [], parallel.partial_linear
    monkeypatch.setattr(parallel, "partial_linear", lambda *args, **how: products.append(1) or compute(*args, **how))
    drafter, counts = random_parallel_drafter(head=head), []
    for depth in (2, 4):
        products.clear()
        trained_logits(drafter, model, known_text(drafter), depth=depth)
        counts.append(len(products))
    assert counts[1] - counts[0] == 2 * serial


@pytest.mark.parametrize("head", ["recurrent", "markov"])
def test_a_few_steps_of_training_are_worth_many_tokens(head):
    base = trained_base(vocab=48, initializer_range=0.05, num_hidden_layers=3)
    circle = learn_circle(base, 40)
    config = TrainConfig(form="parallel", head=head, steps=60, draft_len=4, cpu=True, lr=1e-2, log_every=60)
    drafter = new_drafter(base, config, circle.sort().values)
    texts = ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20)
    before = texts.measure(drafter, TreeShape(3, 4, 13)).tokens_per_step
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    result = train(base, drafter, batches, config, log=lambda _: None)
    assert texts.measure(drafter, TreeShape(3, 4, 13)).tokens_per_step > max(3.5, before)
    assert result.accuracy[3] > 0.8


@pytest.mark.parametrize(
    "more",
    [[], ["--head-shortlist", "16", "--draft-vocab-size", "40"], ["--head-rank", "80"]],
    ids=["all", "shortlist", "rank above the width"],
)
def test_the_command_makes_a_drafter_that_loads_and_is_trained_further(more, tmp_path, capsys):
    words = command(tmp_path, "--form", "parallel", "--steps", "4", "--lr", "1e-2", *more)
    assert main(words) == 0
    base, out = tmp_path / "base", tmp_path / "out"
    assert "drafter of" in capsys.readouterr().out
    drafter = ParallelDrafter.from_pretrained(out)
    assert (drafter.config.trained_draft_len, drafter.config.num_layers) == (3, 2)
    assert "# Parallel drafter for base" in (out / "README.md").read_text()
    assert record(tmp_path)["config"]["form"] == "parallel"
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        written(base, out, **how)
    prompts = ["--prompts", str(tmp_path / "data.jsonl"), "--num-prompts", "2", "--new-tokens", "8"]
    assert redrafter(["evaluate", "--model", str(base), "--drafter", str(out), *prompts, "--device", "cpu"]) == 0
    assert "tokens/step" in capsys.readouterr().out
    plain = command(tmp_path, "--steps", "2", "--drafter", str(out))
    plain[plain.index("--output") + 1] = str(tmp_path / "more")
    assert main(plain) == 0
    assert main([*plain, "--lora-rank", "2", "--overwrite"]) == 0
    written(base, tmp_path / "more")
    assert main([*words, "--dry-run"]) == 0
    assert "its attention to the texts" in capsys.readouterr().out


def test_a_resumed_training_ends_bit_for_bit_where_it_would_have(tmp_path, capsys):
    words = command(tmp_path, "--form", "parallel", "--save-every", "2", "--validate-prompts", "0")
    check_resumed_training(words, tmp_path, capsys, ParallelDrafter)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--exit-dim 8", "--exit-dim is for --form recurrent: leave it out with --form parallel"),
        ("--context-window 0", "--context-window must be at least 1 with --form parallel"),
        ("--num-layers 0", "--num-layers must be at least 1 with --form parallel"),
        ("--target-layers none", "--target-layers none is not for --form parallel"),
    ],
)
def test_options_that_no_parallel_drafter_can_have_are_refused(option, error, tmp_path, capsys):
    assert error in refused(capsys, command(tmp_path, "--form", "parallel", *option.split()))
    words = command(tmp_path, "--head", "markov")
    assert "--head is for --form parallel: leave it out with --form recurrent" in refused(capsys, words)
