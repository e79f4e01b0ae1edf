"""Updates of low rank train a drafter further beside frozen weights, and what is saved is a drafter like it."""

import pytest
import torch
from torch import nn

from helpers.models import tiny_drafter
from helpers.models import tiny_model as tiny_base
from helpers.training import command, learn_circle, random_drafter, record, refused, round_circle, tiny_model
from redrafter import Engine, ReDrafter
from redrafter.drafting.drafter_model import partial_linear
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.drafting.low_rank import LowRankDrafter, LowRankLinear
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import Trainer, train
from redrafter.train.processes import new_accelerator
from redrafter.train.train_drafter import main

FORMS = {
    "published": {"recurrence": "apple"},
    "gated": {"recurrence": "gated", "context_window": 8, "head_rank": 8, "target_layers": (0,)},
    "eagle": {"form": "eagle3"},
    "DSpark": {"form": "dspark", "draft_len": 3, "num_layers": 1},
    "DFlash2": {"form": "dflash2", "draft_len": 3, "num_layers": 1},
}


def noisy(layer: LowRankLinear) -> LowRankLinear:
    nn.init.normal_(layer.lora_B)
    return layer


def test_a_layer_computes_the_product_of_its_sum_whole_and_in_parts():
    torch.manual_seed(0)
    plain, x = nn.Linear(12, 7), torch.randn(5, 12)
    layer, merged = noisy(LowRankLinear(plain, 3)), nn.Linear(12, 7)
    assert torch.equal(LowRankLinear(plain, 3)(x), plain(x)), "it begins as it was"
    with torch.no_grad():
        merged.weight.copy_(layer.weight + layer.lora_B @ layer.lora_A)
        merged.bias.copy_(plain.bias)
    torch.testing.assert_close(layer(x), merged(x))
    assert not torch.allclose(layer(x), plain(x), atol=0.1)
    for columns, with_bias in ((slice(4), True), (slice(4, None), False)):
        part = partial_linear(layer, x[:, columns], columns, with_bias=with_bias)
        torch.testing.assert_close(part, partial_linear(merged, x[:, columns], columns, with_bias=with_bias))


@pytest.mark.parametrize("form", FORMS)
def test_only_updates_of_that_rank_are_learnt_and_they_learn(form):
    base = tiny_model()
    circle = learn_circle(base, 40)
    drafter = new_drafter(base, TrainConfig(**FORMS[form]))
    before, batches = {name: x.clone() for name, x in drafter.state_dict().items()}, []
    for seed in range(60):
        ids = round_circle(circle, 4, seed)
        batches.append((ids, torch.ones_like(ids, dtype=torch.bool)))
    config = TrainConfig(steps=len(batches), draft_len=3, lr=0.03, lora_rank=2, cpu=True, log_every=10)
    losses = []
    train(base, drafter, batches, config, progress=lambda progress: losses.append(progress.loss))
    assert losses[-1] < 0.8 * losses[0]
    assert drafter.state_dict().keys() == before.keys()
    changed = {name for name, x in drafter.state_dict().items() if not torch.equal(x, before[name])}
    layers = {f"{name}.weight" for name, module in drafter.named_modules() if type(module) is nn.Linear}
    heads = ("lm_head.weight", "markov_head.markov_w2.weight")
    assert changed == {name for name in layers if name not in heads}
    for name in changed:
        singular = torch.linalg.svdvals(drafter.state_dict()[name] - before[name])
        assert (singular[2:] < 1e-4 * singular[0]).all(), name


def test_the_optimizer_has_states_of_the_factors_alone():
    base, drafter = tiny_model(), random_drafter(tiny_model())
    trainer = Trainer(base, drafter, TrainConfig(lora_rank=2, cpu=True), new_accelerator(TrainConfig(cpu=True)), None)
    held = sum(weight.numel() for group in trainer.optimizer.param_groups for weight in group["params"])
    layers = [module for module in drafter.modules() if type(module) is nn.Linear and module is not drafter.lm_head]
    assert held == sum(2 * (layer.in_features + layer.out_features) for layer in layers)
    assert held < 0.2 * drafter.num_parameters()


@pytest.mark.parametrize(
    ("options", "peak"),
    [
        ({}, 1e-3),
        ({"drafter": "d"}, 5e-4),
        ({"drafter": "d", "lora_rank": 2}, 3e-3),
        ({"drafter": "d", "lora_rank": 2, "lr": 0.1}, 0.1),
    ],
)
def test_the_learning_rate_suits_what_is_trained_unless_it_is_given(options, peak):
    base, rates = tiny_model(), []
    ids = torch.arange(5, 25)[None]
    config = TrainConfig(steps=1, draft_len=2, cpu=True, warmup=0, log_every=1, **options)
    batch = ids, torch.ones_like(ids, dtype=torch.bool)
    train(base, random_drafter(base), [batch], config, progress=lambda progress: rates.append(progress.learning_rate))
    assert rates == [peak]


def test_a_running_engine_takes_what_was_saved_and_its_texts_stay(tmp_path):
    base, drafter = tiny_base("llama"), tiny_drafter(recurrence="gated", context_window=8)
    engine = ReDrafter(Target(base), drafter)
    low_rank = LowRankDrafter(drafter, 3)
    for module in low_rank.drafter.modules():
        if isinstance(module, LowRankLinear):
            noisy(module)
    updated = low_rank.whole = tiny_drafter(recurrence="gated", context_window=8)
    low_rank.merge()
    hidden, embedding = torch.randn(2, 5, base.config.hidden_size)
    scores = [each(embedding, None, each.begin(hidden))[0] for each in (low_rank.drafter, updated, drafter)]
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.allclose(scores[0], scores[2], atol=0.1)
    updated.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 14, 3], [8, 8, 60, 21]])
    expected = Engine(Target(base), UndraftedProposer()).generate(ids, max_new_tokens=20, do_sample=False)
    engine.change_drafter(tmp_path)
    assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False), expected)


def test_the_command_saves_a_drafter_of_the_same_form(tmp_path, capsys):
    first = ["--steps", "3", "--context-window", "8", "--head-rank", "8"]
    assert main(command(tmp_path, *first)) == 0
    (tmp_path / "out").rename(tmp_path / "first")
    more = ["--drafter", str(tmp_path / "first"), "--lora-rank", "2", "--steps", "3"]
    assert main(command(tmp_path, *more, "--dry-run")) == 0
    planned = capsys.readouterr().out
    assert main(command(tmp_path, *more)) == 0
    said = capsys.readouterr().out
    before, after = open_drafter_model(tmp_path / "first"), open_drafter_model(tmp_path / "out")
    assert before.config.to_diff_dict() == after.config.to_diff_dict()
    assert before.state_dict().keys() == after.state_dict().keys()
    assert not torch.equal(before.rnn_gate.weight, after.rnn_gate.weight)
    count = LowRankDrafter(before, 2).trained_parameters
    assert f"{count:,} of rank 2 trained" in said
    assert f"{count:,} trainable parameters of {before.num_parameters():,}" in planned
    assert f"their gradients {4 * count / 1e6:.2f} MB, AdamW's state {8 * count / 1e6:.2f} MB" in planned
    options = record(tmp_path)["config"]
    assert (options["lora_rank"], options["lr"]) == (2, 0.003)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--lora-rank", "2"], "--lora-rank updates a drafter that is trained: give it with --drafter D"),
        (["--lora-rank", "0"], "--lora-rank must be positive, got 0"),
    ],
)
def test_what_goes_not_together_is_refused_by_name(tmp_path, capsys, more, told):
    assert told in refused(capsys, command(tmp_path, *more))
