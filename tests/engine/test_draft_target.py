"""A second model drafts: whatever it says, the tokens are the target's; where it says the same, all of it is kept.

Its vocabulary is the target's, or another one, of which it drafts the tokens that both have.
"""

import copy

import pytest
import torch
from einops import rearrange
from transformers import LogitsProcessor

from helpers.generation import ON_BOTH_CACHES, noted, same_as_model, same_undrafted
from helpers.models import CONTEXT, VOCAB, assert_close_by_scale, paged, row_texts, tiny_model, uneven_batch
from helpers.steps import prefill, read_prompts
from helpers.vocabularies import renumbered
from redrafter import ArgumentError, DraftTarget
from redrafter.cache.paged import PagedCache
from redrafter.drafting.policy import CostPolicy
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.step import step

NEW = 20
IDS, MASK = uneven_batch()
NO_EOS = {"eos_token_id": None, "return_dict_in_generate": True}
GREEDY = {"do_sample": False}
SHAPES = {
    "chain": {},
    "tree": {"num_beams": 3},
    "few nodes": {"num_beams": 3, "node_budget": 6},
    "adaptive": {"adaptive": True},
    "adaptive tree": {"num_beams": 3, "adaptive": True},
    "rejection": {"acceptance": "rejection"},
}


# Shapes, and whether the draft model has another vocabulary.
def blurred(model, amount=0.02):
    """Return a copy that often says what the model says, and often does not."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in copied.parameters():
            weight += amount * torch.randn(weight.shape, generator=generator)
    return copied


@pytest.fixture(scope="module")
def similar(llama):
    return blurred(llama)


@pytest.fixture(scope="module")
def some_shared(llama):
    """Return a renumbered copy of the target that has two thirds of its tokens, and the map."""
    return renumbered(llama, 0.67)


def drafted_by(model, pair, **shape):
    draft_model, vocabulary = pair
    return DraftTarget(Target(model), Target(draft_model), vocabulary=vocabulary, **shape)


@pytest.fixture
def make(llama, similar, some_shared):
    """Make an engine of a shape, with a draft model that is often right; its vocabulary may be another."""
    return lambda other, **shape: drafted_by(llama, some_shared if other else (similar, None), **shape)


@pytest.mark.costly
@ON_BOTH_CACHES
@pytest.mark.parametrize(("shape", "other"), [(shape, other) for shape in SHAPES for other in (False, True)])
def test_greedy_texts_to_the_end_of_the_context_are_those_of_the_model(make, on, shape, other):
    engine = on(make(other, **SHAPES[shape]))
    for rows in (1, 4):
        assert same_as_model(engine, IDS[:rows], MASK[:rows], max_length=CONTEXT, eos_token_id=None).shape[1] == CONTEXT
    out = same_undrafted(engine, IDS, MASK, max_new_tokens=NEW, repetition_penalty=1.2, output_logits=True, **NO_EOS)
    assert 0 < out.stats.accepted < out.stats.emitted


@ON_BOTH_CACHES
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": False, "repetition_penalty": 1.3, "suppress_tokens": [0]},
        {"do_sample": False, "no_repeat_ngram_size": 1},
        {"do_sample": True, "seed": 7, "temperature": [0.6, 0.9, 1.2, 0.8]},
        {"do_sample": True, "seed": 7, "top_p": 0.8},
        {"do_sample": True, "seed": 7, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("draft", ["the target", "a copy", "other ids"])
def test_all_is_kept_of_a_draft_model_that_is_the_target(llama, on, acceptance, sampling, draft):
    if draft == "other ids":
        engine = on(drafted_by(llama, renumbered(llama), acceptance=acceptance))
    else:
        draft_model = copy.deepcopy(llama) if draft == "a copy" else llama
        engine = on(DraftTarget.from_pretrained(llama, draft_model, acceptance=acceptance))
        assert (engine.draft_model is engine.target) == (draft_model is llama)
    stats = engine.generate(IDS, MASK, max_new_tokens=1 + 5 * 5, **NO_EOS, **sampling).stats
    assert stats.tokens_per_step == 5
    assert stats.accepted == stats.drafted - stats.copies == 4 * 4 * 5


@ON_BOTH_CACHES
@pytest.mark.parametrize("sampling", [GREEDY, {"do_sample": True, "temperature": 0.9, "seed": 2}])
def test_an_unrelated_draft_model_changes_the_steps_alone_and_an_adaptive_engine_drafts_less(llama, on, sampling):
    unrelated, arguments = tiny_model("gpt2", num_hidden_layers=1), {"max_new_tokens": 40} | NO_EOS | sampling
    right = on(DraftTarget.from_pretrained(llama, llama)).generate(IDS, MASK, **arguments)
    outs = [
        on(DraftTarget.from_pretrained(llama, unrelated, draft_len=6, adaptive=x)).generate(IDS, MASK, **arguments)
        for x in (False, True)
    ]
    assert all(torch.equal(out.sequences, right.sequences) for out in outs)
    assert outs[0].stats.steps > 2 * right.stats.steps
    assert outs[1].stats.drafted < 0.5 * outs[0].stats.drafted


@pytest.mark.parametrize("allowed", [[7, 8, 9], "unshared"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_only_shared_tokens_are_drafted(make, some_shared, allowed, acceptance):
    if allowed == "unshared":  # the draft model can draft nothing that is allowed
        allowed = (~some_shared[1].shared).nonzero()[:, 0].tolist()
    engine = make(True, acceptance=acceptance)
    arguments = {"max_new_tokens": 20, "do_sample": True, "seed": 5} | NO_EOS
    arguments["bad_words_ids"] = [[id] for id in range(VOCAB) if id not in allowed]
    out = (same_undrafted if acceptance == "match" else type(engine).generate)(engine, IDS, MASK, **arguments)
    assert torch.isin(out.sequences[:, IDS.shape[1] :], torch.tensor(allowed)).all()
    if len(allowed) > 3:
        assert out.stats.accepted == 0


def draft_texts(vocabulary, tokens, lengths):
    """Return texts as the draft model reads them, padded, and their lengths."""
    if vocabulary is None:
        return tokens, lengths
    texts = []
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        text = DraftText(vocabulary)
        text.length(row[:length])
        texts.append(text.ids)
    counts = [len(text) for text in texts]
    return torch.tensor([text + [0] * (max(counts) + 1 - len(text)) for text in texts]), torch.tensor(counts)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 3, 99), (3, 3, 5)])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_draft_models_cache_follows_the_accepted_path(make, other, shape, sampled):
    beams, draft_len, budget = shape
    engine = make(other, draft_len=draft_len, num_beams=beams, node_budget=budget)
    target, draft_model, vocabulary = engine.target, engine.draft_model, engine.draft_vocabulary
    length = MASK.sum(1)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    tokens[:, : IDS.shape[1]] = row_texts(IDS, MASK) * (torch.arange(IDS.shape[1]) < length[:, None])
    seeds = torch.tensor([1, 2, 3, 4]) if sampled else None
    sampler = Sampler(seeds, (), torch.ones(4), length, length + 40, torch.arange(VOCAB))

    def new_cache(model):
        cache = model.new_cache(4)
        cache.reserve(160)
        return cache

    cache, draft_cache, accepted = new_cache(target), new_cache(draft_model), []
    with torch.inference_mode():
        prompts, lengths = draft_texts(vocabulary, tokens, length)
        read_prompts(draft_model, prompts, lengths, draft_cache)
        state = prefill(tokens, length, target, cache, sampler)
        for _ in range(6):
            state, drawn = step(state, engine.proposer, target, cache, sampler, draft_cache)
            accepted += drawn.path.accepted.tolist()
            texts, lengths = draft_texts(vocabulary, state.tokens, state.length)
            fresh = new_cache(draft_model)
            read_prompts(draft_model, texts, lengths, fresh)
            for pools in zip(draft_cache.pools, fresh.pools, strict=True):
                stored, expected = (rearrange(pool.data, "g (b s) h d -> b s g h d", b=4) for pool in pools)
                for row, n in enumerate(lengths.tolist()):  # slot n - 1 is read again in the next step
                    assert_close_by_scale(stored[row, : n - 1], expected[row, : n - 1], 2e-5)
    assert len(set(accepted)) > 2  # or nothing was shown


@pytest.mark.parametrize("beams", [1, 3])
def test_a_draft_model_reads_nothing_twice(llama, similar, beams):
    shape = {"draft_len": 4, "num_beams": beams, "node_budget": 9}
    engine = DraftTarget.from_pretrained(llama, similar, **shape, draft_from_text=False)
    read = []
    hooks = [
        model.register_forward_pre_hook(
            lambda _, args, inputs, name=name: read.append((name, inputs["input_ids"].shape[1])), with_kwargs=True
        )
        for name, model in (("target", llama), ("draft", similar))
    ]
    with torch.inference_mode():
        out = engine.generate(IDS[:1], MASK[:1], max_new_tokens=NEW, do_sample=False, **NO_EOS)
    for hook in hooks:
        hook.remove()
    one = [("draft", 2), *[("draft", beams)] * 3, ("target", engine.proposer.nodes)]
    assert read == [("draft", 11), ("target", 11), *one * out.stats.steps]
    assert out.stats.steps < NEW - 1


@ON_BOTH_CACHES
@pytest.mark.parametrize("vocabulary", [90, 128])
@pytest.mark.parametrize(
    "sampling", [GREEDY, {"do_sample": True, "seed": 3}, {"do_sample": True, "top_k": 3, "seed": 3}]
)
def test_a_draft_model_may_have_more_ids_or_fewer(llama, on, vocabulary, sampling):
    ids = IDS.where((torch.arange(IDS.shape[1]) % 3 > 0) | (MASK == 0), VOCAB - 1)  # some that the smaller one lacks
    draft_model = tiny_model("llama", vocab_size=vocabulary, num_hidden_layers=1)
    engine = on(DraftTarget.from_pretrained(llama, draft_model, num_beams=2))
    same_undrafted(engine, ids, MASK, max_new_tokens=NEW, **sampling)


def test_a_tree_is_judged_by_how_deep_it_is(llama, monkeypatch):
    """Its 12 nodes are 4 drafts one below the other: when 4 are kept, none was refused."""
    monkeypatch.setattr("redrafter.drafting.step_times.LEVEL", ((1, 0.0),))  # no cost and no doubt shortens it
    levels = noted(monkeypatch, CostPolicy, "record", lambda _, policy, step: max(step.levels))
    engine = DraftTarget.from_pretrained(llama, llama, num_beams=3, node_budget=99, adaptive=True)
    engine.generate(IDS[:1], max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert len(levels) > 5
    assert 1 < max(levels) <= 4


@ON_BOTH_CACHES
@pytest.mark.parametrize("budget", [1, 3, None])
def test_a_search_may_be_much_wider_than_what_is_verified(llama, on, budget):
    """The draft model's cache holds all that was searched: 1 + 8 * 4 nodes here, at the end of the last row too."""
    arguments = {"max_length": CONTEXT, "repetition_penalty": 1.2, "eos_token_id": None}
    arguments["suppress_tokens"] = [0]  # padding, which a penalty of transformers before 5.23 counts as text
    shape = {"num_beams": 8, "draft_len": 5, "node_budget": budget}
    engine = on(DraftTarget.from_pretrained(llama, copy.deepcopy(llama), **shape))
    same_as_model(engine, IDS[:2], MASK[:2], **arguments)


class Counting(LogitsProcessor):
    """A grammar with one text. Of any other it knows nothing: it raises, or allows no token."""

    def __init__(self, raises):
        self.raises = raises

    def __call__(self, input_ids, scores):
        new = input_ids[0, IDS.shape[1] :].tolist()
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        if new == [7 + n % 7 for n in range(len(new))]:
            allowed[:, 7 + len(new) % 7] = True
        elif self.raises:
            raise ValueError("not in the grammar")
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.filterwarnings("ignore:Counting")
@ON_BOTH_CACHES
@pytest.mark.parametrize("shape", ["chain", "tree", "adaptive tree"])
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, {"do_sample": True, "seed": 1}])
def test_a_grammar_is_kept_to_and_never_asked_about_what_it_forbids(make, on, shape, raises, sampling):
    engine = on(make(False, **SHAPES[shape]))
    out = engine.generate(IDS[:1], logits_processor=[Counting(raises)], max_new_tokens=15, **NO_EOS, **sampling)
    assert out.sequences[0, IDS.shape[1] :].tolist() == [7 + n % 7 for n in range(15)]
    assert out.stats.steps < 14


@pytest.mark.costly
@pytest.mark.parametrize(("other", "new"), [(False, 29), *((True, new) for new in range(24, 32))])
def test_what_is_found_again_was_read_by_both_models(llama, some_shared, other, new):
    """The last draft of a step that was kept whole is proposed and not yet read: here it may end a block."""
    engine = paged(drafted_by(llama, some_shared if other else (copy.deepcopy(llama), None), draft_len=3))
    prompt = torch.randint(3, VOCAB, (1, 40 if other else 20), generator=torch.Generator().manual_seed(5))
    arguments = {"max_new_tokens": new, "eos_token_id": None} | GREEDY
    text = engine.generate(prompt, **arguments)
    memory, ids = engine.memory, text[0].tolist()
    read = [
        (engine.target, memory.store, memory.blocks, ids),
        (engine.draft_model, memory.draft_store, memory.blocks, ids),
    ]
    if other:
        draft_text = DraftText(engine.draft_vocabulary)
        draft_text.length(ids)
        read = [(engine.draft_model, memory.draft_store, memory.draft_blocks, draft_text.ids)]
    for model, store, blocks, tokens in read:
        table, fresh = blocks.admit([*tokens, 5], len(tokens) + 1), model.new_cache(1)
        assert table.reused >= max(len(tokens) - 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
        fresh.reserve(len(tokens))
        with torch.inference_mode():
            read_prompts(model, torch.tensor([tokens]), torch.tensor([len(tokens)]), fresh)
        at, reused = torch.arange(table.reused), PagedCache(store, torch.tensor([table.blocks]).int())
        for pool, expected in zip(store.pools, fresh.pools, strict=True):
            assert_close_by_scale(pool[:, reused.slots(at[None])], expected.data[:, at], 2e-5)
        blocks.release(table)
    again = engine.generate(text[:, :50], **arguments)
    assert torch.equal(again[:, : text.shape[1]], text[:, : again.shape[1]])


def test_limits_of_an_engine_hold_and_all_blocks_are_given_back(llama, similar, some_shared):
    engine = DraftTarget(Target(llama), Target(similar), options=EngineOptions(max_seq_len=20))
    assert engine.generate(IDS, MASK, max_new_tokens=50, eos_token_id=None, **GREEDY).shape[1] <= 20 + 9
    engine = paged(drafted_by(llama, some_shared))
    engine.generate(IDS, MASK, max_new_tokens=20)
    assert engine.memory.blocks.num_free_blocks == engine.memory.draft_blocks.num_free_blocks == 199


def test_a_search_is_no_wider_than_what_is_shared(make, some_shared):
    with pytest.raises(ArgumentError, match=f"can draft: {some_shared[1].shared_count}"):
        make(True, num_beams=some_shared[1].shared_count + 1)
