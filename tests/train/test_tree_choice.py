"""The tree that training writes into a drafter's config."""

from itertools import count

import pytest
import torch

from helpers.models import DRAFTER_ALONE
from helpers.training import learn_circle, round_circle, tiny_model
from redrafter.engine.redrafter import ReDrafter
from redrafter.measure.replay import ValidationTexts
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.output import best_tree, candidates, choose_tree
from redrafter.tree.sizes import TreeShape


def test_the_tree_that_writes_most_is_chosen_and_of_equals_the_shallowest():
    shapes = {"deep": TreeShape(3, 9, 26), "wide": TreeShape(6, 4, 25)}
    for deep, wide, chosen in (
        ((5.0, 3.0), (4.0, 3.0), "deep"),  # the mean of both temperatures counts
        ((4.0, 3.0), (3.0, 4.5), "wide"),
        ((4.02, 3.0), (4.0, 3.0), "wide"),  # as good: the shallower one
        ((4.2, 3.0), (4.0, 3.0), "deep"),
    ):
        assert best_tree({shapes["deep"]: deep, shapes["wide"]: wide}) == shapes[chosen]


def test_of_trees_as_deep_the_best_is_chosen():
    assert best_tree({TreeShape(2, 4, 9): (4.0, 3.0), TreeShape(5, 4, 21): (4.01, 3.0)}) == TreeShape(5, 4, 21)


@pytest.mark.variant  # trains a base and a drafter
def test_a_drafter_of_a_base_that_never_strays_is_searched_deep():
    """What is chosen is what `generate` measures best, among other trees of as many nodes."""
    base = tiny_model(vocab=48, initializer_range=0.05)
    circle = learn_circle(base, 40)
    config = TrainConfig(steps=80, draft_len=4, cpu=True, lr=1e-2, log_every=80)
    drafter = new_drafter(base, config)
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    train(base, drafter, batches, config, log=lambda _: None)
    texts = ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 32)
    measured, line = choose_tree(drafter, texts, 4, seed=0)
    found = drafter.config.draft_beams, drafter.config.draft_len_per_beam
    assert found[1] > 4
    assert {shape.node_budget for shape in candidates(drafter, 4)} <= set(range(27))
    assert f"{found[0]}x{found[1]} writes most" in line
    assert "; 5x4 " in line
    engine = ReDrafter(texts.target, drafter, TreeShape(node_budget=26), options=DRAFTER_ALONE)
    settings = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    assert (
        engine.generate(torch.tensor(texts.prompts), **settings).stats.tokens_per_step
        == measured["greedy"].tokens_per_step
    )
