"""A drafter that attends to committed tokens: what it finds in the cache is what the whole text gives, always."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from einops import rearrange
from torch import Tensor

from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.scheduling import KINDS, alone, launch_ahead, make_sequence, random_sequences, run, scheduler
from helpers.steps import read_prompts
from redrafter import MismatchError, ReDrafter
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentDrafter, RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.train.teacher import Teacher
from redrafter.tree.token_tree import Tree

WINDOW = 12  # shorter than the texts of these tests


def context_drafter(**changes: object) -> RecurrentDrafter:
    """Make a random drafter that attends to committed tokens and reads two layers of the target."""
    form = {"recurrence": "gated", "target_layers": (0, 1), "context_window": WINDOW, "context_head_dim": 8}
    drafter = tiny_drafter(**(form | changes))
    with torch.no_grad():
        drafter.context.out.weight.mul_(20)  # or nothing that is read would show
    return drafter


def engine_of(architecture: str = "llama", **changes: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture), context_drafter(**changes), 4, 3)
    engine.pauses = False
    return engine


@pytest.fixture
def checks(monkeypatch) -> Iterator[list[int]]:
    """Compare what every search reads with what the whole text gives; yield the lengths of texts that were checked."""
    propose, checked = RecurrentProposer.propose, []

    def propose_checked(
        self: RecurrentProposer, state: State, sampler: Sampler, noise: Tensor | None, *caches: object
    ) -> Tree:
        window = self.read_window(state.length, caches[0])
        for row in state.active.nonzero().flatten().tolist():
            text = state.tokens[row : row + 1, : state.length[row]]
            keys, values = remembered(self.drafter, self.target.model, text)
            keys, values = keys[:-1][-WINDOW:], values[1:][-WINDOW:]
            seen = window.bias[row, 0, 0] == 0
            assert seen[0], "nothing is a choice"
            assert int(seen.sum()) == 1 + len(keys)
            found = rearrange(window.keys[row], "h d s -> s h d")[seen], window.values[row].transpose(0, 1)[seen]
            for part, expected in zip(found, (keys, values), strict=True):
                torch.testing.assert_close(part[1:], expected, atol=1e-4, rtol=1e-3)
                assert not part[0].any()
            checked.append(text.shape[1])
        return propose(self, state, sampler, noise, *caches)

    monkeypatch.setattr(RecurrentProposer, "propose", propose_checked)
    yield checked
    assert max(checked, default=0) > 2 * WINDOW, "no long text was checked"


def remembered(drafter: RecurrentDrafter, model: torch.nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a text `[1, T]`, `[T, H, d]` each, from one forward over all of it."""
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read(text)
    fused = drafter.fuse_hidden(output.hidden[0])
    return drafter.context.remember(fused, output.embedding[0], torch.arange(text.shape[1]))


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
@pytest.mark.parametrize("kinds", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
def test_generate_writes_what_plain_decoding_writes(architecture, kinds, on, checks):
    engine = on(engine_of(architecture))
    ids, mask = uneven_batch()
    texts = [engine.generate(ids, mask, max_new_tokens=30, speculate=speculate, **kinds) for speculate in (True, False)]
    assert torch.equal(*texts)
    if not kinds["do_sample"]:
        expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
        assert torch.equal(texts[0], expected)


@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 40}, {"max_batch_size": 3}, {"reuse": False}], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_sequences_that_come_and_go_find_their_texts(ahead, limits, checks, monkeypatch):
    if ahead:
        launch_ahead(monkeypatch)
    engine = paged(engine_of())
    sequences = random_sequences(14, max_new_tokens=40)
    for sequence in sequences[::3]:
        sequence.params = replace(sequence.params, speculate=False)
    run(scheduler(engine, **limits), sequences, apart=2)
    assert [sequence.sink.tokens for sequence in sequences] == [alone(engine, sequence) for sequence in sequences]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_prefixes_that_are_found_again_and_preempted_texts_are_remembered(ahead, checks, monkeypatch):
    if ahead:
        launch_ahead(monkeypatch)
    engine = paged(engine_of())
    made = scheduler(engine, blocks=16, max_batch_size=4)
    prefix = torch.randint(3, VOCAB, (35,), generator=torch.Generator().manual_seed(1)).tolist()
    for _ in range(2):
        sequences = [make_sequence([*prefix, 5 + index], 40, KINDS["greedy"]) for index in range(6)]
        run(made, sequences)
        assert len({tuple(sequence.sink.tokens) for sequence in sequences}) > 1
        assert [sequence.sink.tokens for sequence in sequences] == [alone(engine, sequence) for sequence in sequences]
    assert all(sequence.reused for sequence in sequences)
    assert made.preempted


def test_what_is_read_changes_the_drafts():
    engine, ids = engine_of(), torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    trees = []
    propose = RecurrentProposer.propose

    def kept(self, *arguments):
        trees.append(propose(self, *arguments))
        return trees[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentProposer, "propose", kept)
        engine.generate(ids, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            engine.drafter.context.out.weight.zero_()
        engine.generate(ids, max_new_tokens=2, do_sample=False)
    assert not torch.equal(trees[0].tokens, trees[-1].tokens)


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
def test_a_window_longer_than_any_text_takes_no_more_memory_than_the_texts(on, monkeypatch):
    engine, ids, pairs = on(engine_of(context_window=100_000)), torch.arange(3, 33)[None], []
    read_window = RecurrentProposer.read_window

    def read_counted(self: RecurrentProposer, *arguments: object) -> ContextWindow:
        window = read_window(self, *arguments)
        pairs.append(window.bias.shape[-1] - 1)
        return window

    monkeypatch.setattr(RecurrentProposer, "read_window", read_counted)
    text = engine.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(text, engine.generate(ids, max_new_tokens=10, do_sample=False, speculate=False))
    assert pairs
    assert 40 <= min(pairs) <= max(pairs) < 1_000


def test_a_second_drafter_on_one_target_is_refused():
    engine = engine_of()
    ReDrafter(engine.target, engine.drafter)
    with pytest.raises(MismatchError, match="load the target anew"):
        ReDrafter(engine.target, context_drafter())


@torch.inference_mode()
def test_a_cache_that_is_older_than_the_drafter_is_left_alone():
    target = Target(tiny_model("llama"))
    cache, ids = target.new_cache(1), torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(2))
    cache.reserve(20)
    ReDrafter(target, context_drafter())
    read_prompts(target, ids, torch.tensor([20]), cache)
    fresh = target.new_cache(1)
    fresh.reserve(20)
    read_prompts(target, ids, torch.tensor([20]), fresh)
    assert len(fresh.layers) == len(cache.layers) + 1
    for mine, other in zip(cache.layers, fresh.layers, strict=False):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
