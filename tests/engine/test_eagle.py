"""EAGLE-3 heads as drafters: what they find in the cache is what the whole text gives, and the text is the target's."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.eagle import EAGLE_FORMS, plain_logits, random_head
from helpers.models import VOCAB, paged, tiny_model, uneven_batch, with_tree
from helpers.scheduling import KINDS, alone, launch_ahead, make_sequence, random_sequences, run, scheduler
from redrafter import ArgumentError, CheckpointError, MismatchError, RecurrentDrafter, ReDrafter
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.drafting.eagle import EagleDrafter, EagleProposer
from redrafter.drafting.proposer import State
from redrafter.engine.tuning import Tuning
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.token_tree import Tree

ON = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
DRAWS = pytest.mark.parametrize(
    "draws", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"]
)


def engine_of(architecture: str = "llama", beams: int = 4, depth: int = 3, **changes: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture), random_head(**changes), beams, depth)
    engine.pauses = False
    return engine


@pytest.fixture
def checks(monkeypatch) -> Iterator[list[int]]:
    """Compare the logits of every search with a plain recomputation; yield the lengths of texts that were checked."""
    propose, step, checked, logits = EagleProposer.propose, EagleDrafter.step, [], []

    def step_kept(self: EagleDrafter, *arguments: object) -> tuple:
        result = step(self, *arguments)
        logits.append(result[0])
        return result

    def propose_checked(
        self: EagleProposer, state: State, sampler: Sampler, noise: Tensor | None, *caches: object
    ) -> Tree:
        logits.clear()
        tree = propose(self, state, sampler, noise, *caches)
        for row in state.active.nonzero().flatten().tolist():
            text = state.tokens[row, : state.length[row] + 1]
            path = best_path(tree, row)
            expected = plain_logits(self.drafter, self.target.model, text, tree.tokens[row, path[1:]])
            for level, node in enumerate(path[: len(logits)]):
                beam = 0 if level == 0 else node - 1 - (level - 1) * self.beams
                torch.testing.assert_close(logits[level][row, beam], expected[level], atol=1e-3, rtol=1e-3)
            checked.append(len(text))
        return tree

    monkeypatch.setattr(EagleProposer, "propose", propose_checked)
    monkeypatch.setattr(EagleDrafter, "step", step_kept)
    yield checked
    assert max(checked, default=0) > 24, "no long text was checked"


def best_path(tree: Tree, row: int) -> list[int]:
    """Return the nodes of a whole lattice from the root to the first node of its last level."""
    node = int((tree.depth[row] == tree.levels).nonzero()[0])
    path = [node]
    while node:
        node = int(tree.parents[row, node])
        path.append(node)
    return path[::-1]


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_drafts_follow_from_the_whole_text(form, checks):
    engine = engine_of(**EAGLE_FORMS[form])
    ids, mask = uneven_batch()
    engine.generate(ids, mask, max_new_tokens=24, do_sample=False)


@ON
def test_a_text_may_be_read_in_parts(on, checks, monkeypatch):
    monkeypatch.setattr("redrafter.drafting.eagle.ENTRIES_AT_ONCE", 7)
    engine = on(engine_of(**EAGLE_FORMS["published"]))
    engine.generate(*uneven_batch(), max_new_tokens=20, do_sample=False)


@ON
@DRAWS
@pytest.mark.parametrize(("beams", "depth"), [(1, 4), (4, 3)], ids=["chain", "tree"])
def test_a_batch_gets_what_plain_decoding_writes(beams, depth, draws, on, checks):
    engine = on(engine_of(beams=beams, depth=depth, **EAGLE_FORMS["published"]))
    ids, mask = uneven_batch()
    texts = [engine.generate(ids, mask, max_new_tokens=24, speculate=speculate, **draws) for speculate in (True, False)]
    assert torch.equal(*texts)
    if not draws["do_sample"]:
        expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        assert torch.equal(texts[0], expected)


@pytest.mark.parametrize("form", [name for name in EAGLE_FORMS if name != "published"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_every_form_writes_what_model_generate_writes(architecture, form):
    engine = engine_of(architecture, **EAGLE_FORMS[form])
    ids, mask = uneven_batch()
    expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=16, do_sample=False), expected)


@ON
def test_a_row_alone_draws_what_it_draws_in_a_batch(on):
    engine = on(engine_of(**EAGLE_FORMS["published"]))
    ids, mask = uneven_batch()
    together = engine.generate(ids, mask, max_new_tokens=16, do_sample=True, seed=[5, 6, 7, 8])
    alone = engine.generate(ids[:1], mask[:1], max_new_tokens=16, do_sample=True, seed=5)
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 40}, {"max_batch_size": 3}, {"reuse": False}], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_sequences_that_come_and_go_find_their_texts(ahead, limits, checks, monkeypatch):
    if ahead:
        launch_ahead(monkeypatch)
    engine = paged(engine_of(**EAGLE_FORMS["published"]))
    sequences = random_sequences(10, max_new_tokens=30)
    for sequence in sequences[::3]:
        sequence.params = replace(sequence.params, speculate=False)
    run(scheduler(engine, **limits), sequences, apart=2)
    assert [sequence.sink.tokens for sequence in sequences] == [alone(engine, sequence) for sequence in sequences]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_prefixes_that_are_found_again_and_preempted_texts_are_remembered(ahead, checks, monkeypatch):
    if ahead:
        launch_ahead(monkeypatch)
    engine = paged(engine_of(**EAGLE_FORMS["published"]))
    made = scheduler(engine, blocks=16, max_batch_size=4)
    prefix = torch.randint(3, VOCAB, (35,), generator=torch.Generator().manual_seed(1)).tolist()
    for _ in range(2):
        sequences = [make_sequence([*prefix, 5 + index], 30, KINDS["greedy"]) for index in range(5)]
        run(made, sequences)
        assert len({tuple(sequence.sink.tokens) for sequence in sequences}) > 1
        assert [sequence.sink.tokens for sequence in sequences] == [alone(engine, sequence) for sequence in sequences]
    assert all(sequence.reused for sequence in sequences)
    assert made.preempted


def test_rows_that_share_nodes_write_what_each_writes_alone():
    tuning = Tuning({1: TreeShape(4, 4, 17, 16)}, "", "", "", "")
    engine = paged(ReDrafter(Target(tiny_model("llama")), random_head(**EAGLE_FORMS["published"]), tuning=tuning))
    sequences = random_sequences(8, max_new_tokens=24)
    run(scheduler(engine, max_batch_size=4), sequences, apart=3)
    assert [sequence.sink.tokens for sequence in sequences] == [alone(engine, sequence) for sequence in sequences]
    assert len({delta.drafted for sequence in sequences for delta in sequence.sink.deltas}) > 3


def test_the_map_of_ids_says_what_is_drafted():
    engine = engine_of(**EAGLE_FORMS["published"])
    known, drafted = set(engine.drafter.draft_ids.tolist()), set()
    propose = EagleProposer.propose

    def kept(self: EagleProposer, *arguments: object) -> Tree:
        tree = propose(self, *arguments)
        drafted.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "propose", kept)
        engine.generate(torch.arange(3, 20)[None], max_new_tokens=20, do_sample=False)
    assert len(drafted) > 1
    assert drafted <= known


def test_a_head_reads_its_layers_and_no_other_drafter_may(tmp_path):
    engine = engine_of()
    with pytest.raises(MismatchError, match="load the target anew"):
        ReDrafter(engine.target, random_head())
    with pytest.raises(MismatchError, match="reads layer 7"):
        engine_of(target_layers=[1, 7])


def test_a_saved_head_is_loaded_as_it_was(tmp_path):
    head, ids = random_head(**EAGLE_FORMS["3.1"]), torch.arange(3, 12)[None]
    head.save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(tiny_model("llama"), tmp_path, num_beams=3, draft_len_per_beam=2)
    loaded = engine.drafter.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in head.state_dict().items())
    assert torch.equal(engine.generate(ids, max_new_tokens=9), engine.generate(ids, max_new_tokens=9, speculate=False))
    with pytest.raises(CheckpointError, match="of the type redrafter_eagle3"):
        RecurrentDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rope": {"rope_type": "dynamic"}},
        {"target_layers": [2, 1]},
        {"width": 16},
        {"draft_vocab_size": VOCAB + 1},
        {"hidden_act": "none"},
        {"rms_norm_eps": 2.0},
        {"fc_norm": True, "norm_before_fc": True},
        {"qk_norm": 1},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(change):
    with pytest.raises(ArgumentError, match="EagleConfig"):
        random_head(**change)
