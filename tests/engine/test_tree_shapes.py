"""Shapes of trees by batch size and device, and shapes that are asked for."""

import pytest
import torch

from helpers.models import CONTEXT, DRAFTER_ALONE, tiny_drafter
from redrafter import ArgumentError, ReDrafter
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.drafting.policy import MOST_COPIED
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.recycled import RecycledConfig, RecycledTokens
from redrafter.drafting.step_times import StepCosts
from redrafter.features import FeatureSet
from redrafter.model.shared_model import Revision, SharedModel
from redrafter.model.supported import Support
from redrafter.model.target import Target
from redrafter.parallel.ranks import ALONE
from redrafter.tree.sizes import TreeShape


@pytest.fixture(scope="module")
def target(llama):
    return Target(llama)


def test_an_engine_on_a_gpu_has_a_proposer_for_each_size(monkeypatch):
    monkeypatch.setattr("redrafter.drafting.drafter.RecurrentDrafter.prepare", lambda *_: None)  # asks for its memory

    class OnGPU(Target):
        device, varlen, features, config, context = torch.device("cuda"), Support(), FeatureSet("it"), None, None
        shared, revision, ranks = SharedModel(), Revision(0, 0, 0), ALONE

        def __init__(self) -> None:
            """Bind no model."""

        def read_aux_hidden(self, layers: object) -> None:
            """Read none."""

    monkeypatch.setattr(ReDrafter, "_assumed", StepCosts.assumed("cuda", 0.1, 1.0, 5))
    gpu = OnGPU()
    both = ReDrafter(gpu, tiny_drafter())
    assert both.proposer_for(1) is both.proposer_for(1)
    assert both.proposer_for(1).nodes == 42  # with what is copied from the text
    assert both.proposer_for(1).without_text is both.proposer
    engine = ReDrafter(gpu, tiny_drafter(), options=DRAFTER_ALONE)
    assert engine.proposer_for(1) is engine.proposer
    assert 4 <= engine.proposer_for(16).nodes < engine.proposer_for(2).nodes <= 26
    assert 64 < engine.proposer_for(64).shared_nodes < 256
    assert engine.proposer_for(200).shared_nodes <= 2 * 256
    assert ReDrafter(gpu, tiny_drafter(), TreeShape(node_budget=20)).proposer_for(500).nodes == 20

    # Of a table, steps that sample have a smaller tree, with and without copies.
    monkeypatch.setattr(ReDrafter, "pauses", True)
    table = RecycledTokens(RecycledConfig(hidden_size=8, vocab_size=64, entries=16))
    policy = ReDrafter(gpu, table).draft_policy([1], None)
    greedy, sampled = (policy.choices(1, sampled=each)[0] for each in (False, True))
    assert sampled.nodes < greedy.nodes
    assert sampled.without_text is None
    assert [each.without_text for each in policy.proposers].count(sampled) == 1


def test_a_cpu_verifies_fewer_nodes_in_larger_batches(target):
    engine = ReDrafter(target, tiny_drafter(), options=DRAFTER_ALONE)
    proposers = [engine.proposer_for(rows) for rows in (1, 2, 4, 8, 16, 32)]
    nodes = [proposer.nodes for proposer in proposers]
    assert 8 <= nodes[0] <= engine.proposer.nodes == 12
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[-1] < 5
    asked = ReDrafter(target, tiny_drafter(), TreeShape(node_budget=20), options=DRAFTER_ALONE)
    assert {asked.proposer_for(rows) for rows in (1, 8, 64, 500)} == {asked.proposer}


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"node_budget": 3}])
def test_steps_keep_to_a_shape_that_is_asked_for(llama, asked, monkeypatch):
    monkeypatch.setattr(ReDrafter, "pauses", True)
    engine = ReDrafter.from_pretrained(llama, tiny_drafter(), **asked)
    copying = WithPromptLookup(engine.undrafted, MOST_COPIED)
    both = engine.proposer_for(1)
    assert set(engine.draft_policy([1], None).proposers) == {engine.undrafted, copying, both, both.without_text}
    assert len(set(ReDrafter.from_pretrained(llama, tiny_drafter()).draft_policy([1], None).proposers)) > 3


def test_what_an_engine_may_use_is_passed_on(llama):
    drafter = tiny_drafter()
    engine = ReDrafter.from_pretrained(llama, drafter, max_input_len=7, max_seq_len=CONTEXT, compile=False)
    assert (engine.options.max_input_len, engine.options.max_seq_len, engine.options.compile) == (7, CONTEXT, False)
    with pytest.raises(ArgumentError, match="kv_cache_free_gpu_memory_fraction"):
        ReDrafter.from_pretrained(llama, drafter, kv_cache_free_gpu_memory_fraction=2)
    pair = Pair.load(LoadOptions(max_input_len=9, compile=False))
    assert (pair.engine.options.max_input_len, pair.engine.options.compile) == (9, False)


def test_a_cpu_searches_as_deep_as_was_trained_unless_more_is_asked_for(target):
    """The depth that a training measured best holds for more nodes than a CPU verifies by default."""
    drafter = tiny_drafter(draft_beams=3, draft_len_per_beam=6, trained_draft_len=4)
    shapes = {None: (3, 4, 12), TreeShape(draft_len_per_beam=6): (3, 6, 12), TreeShape(node_budget=16): (3, 6, 16)}
    for shape, searched in shapes.items():
        proposer = ReDrafter(target, drafter, shape).proposer
        assert (proposer.beams, proposer.depth, proposer.nodes) == searched
