"""Training of parallel drafters: what is learnt is what is drafted."""

from itertools import count

import pytest
import torch
from torch import Tensor

from helpers.models import assert_close_by_scale, tiny_model
from helpers.parallel import BLOCK, PARALLEL_FORMS, plain_logits, random_parallel_drafter
from helpers.training import command, known_text, learn_circle, record, refused, round_circle, trained_logits
from helpers.training import tiny_model as trained_base
from redrafter import ParallelDrafter, ReDrafter
from redrafter.cli import main as redrafter
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.evaluate.replay import ValidationTexts
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.loss import Unroll
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
        embedding = read.embedding[0, last + 1 : last + 1 + depth]
        expected = plain_logits(drafter, read.hidden[0, : last + 1], embedding[0], embedding[1:])
        assert_close_by_scale(trained[last], expected[:depth], 1e-5)


@pytest.mark.parametrize("form", ["recurrent", "sliding"])
def test_texts_packed_into_a_row_are_apart(form, model):
    drafter = random_parallel_drafter(**PARALLEL_FORMS[form])
    first, second = known_text(drafter, 8), known_text(drafter, 9, seed=1)
    packed = trained_logits(drafter, model, torch.cat([first, second], dim=1), torch.tensor([[0] * 8 + [1] * 9]))
    assert_close_by_scale(packed[8:14], trained_logits(drafter, model, second)[:6], 1e-5)


@pytest.mark.parametrize("form", PARALLEL_FORMS)
def test_every_weight_is_learnt(form, model):
    drafter = random_parallel_drafter(**PARALLEL_FORMS[form])
    tokens, mask = known_text(drafter), torch.ones(1, LENGTH, dtype=torch.bool)
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(tokens)
    Unroll(drafter, TrainConfig(draft_len=BLOCK))(tokens, mask, output).loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())


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


def written(base: object, drafter: object, **settings: object) -> Tensor:
    engine = ReDrafter.from_pretrained(
        base, drafter, num_beams=3, draft_len_per_beam=3, node_budget=10, draft_from_text=False
    )
    ids, mask = torch.tensor([[1, 30, 40, 12], [0, 0, 1, 9]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    how = {"attention_mask": mask, "max_new_tokens": 16} | settings
    out = engine.generate(ids, **how)
    assert torch.equal(out, engine.generate(ids, **how, speculate=False))
    return out


@pytest.mark.parametrize("more", [[], ["--head-shortlist", "16", "--draft-vocab-size", "40"]], ids=["all", "shortlist"])
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
    assert main([*words, "--steps", "4"]) == 0
    whole = ParallelDrafter.from_pretrained(tmp_path / "out").state_dict()
    newest = tmp_path / "out.checkpoints" / "step-0000004"
    for file in sorted(newest.iterdir()):
        file.unlink()
    newest.rmdir()
    assert main([*words, "--steps", "4", "--resume", "--overwrite"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    found = ParallelDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


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
