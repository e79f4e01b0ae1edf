"""A draft model with another vocabulary: the tokens are the target's, and drafts are kept where both models agree."""

from dataclasses import replace

import pytest
import torch
from einops import rearrange

from helpers.models import CONTEXT, VOCAB, assert_close_by_scale, paged, row_texts, tiny_model, uneven_batch
from helpers.steps import prefill, read_prompts
from helpers.tokenizers import TEXTS, byte_level, sentencepiece_like
from helpers.vocabularies import renumbered
from redrafter import ArgumentError, DraftTarget
from redrafter.cache.paged import PagedCache
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.step import step

IDS, MASK = uneven_batch()
NO_EOS = {"eos_token_id": None, "return_dict_in_generate": True}
BOTH_CACHES = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
SHAPES = {
    "chain": {},
    "few nodes": {"num_beams": 3, "node_budget": 6},
    "adaptive": {"adaptive": True},
    "rejection": {"acceptance": "rejection"},
}
SAMPLING = {
    "greedy": {"do_sample": False},
    "penalised": {"do_sample": False, "repetition_penalty": 1.3, "suppress_tokens": [0]},
    "sampled": {"do_sample": True, "temperature": 0.8, "seed": 3},
    "top_p": {"do_sample": True, "top_p": 0.9, "seed": 4},
}


@pytest.fixture(scope="module")
def some_shared(llama):
    """Return a renumbered copy of the target that has two thirds of its tokens, and the map."""
    return renumbered(llama, 0.67)


def make_engine(llama, pair, **shape):
    draft_model, vocabulary = pair
    return DraftTarget(Target(llama), Target(draft_model), vocabulary=vocabulary, **shape)


@BOTH_CACHES
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_model_generate(llama, some_shared, on, rows, shape):
    engine = on(make_engine(llama, some_shared, **SHAPES[shape]))
    arguments = {"max_length": CONTEXT, "do_sample": False}
    expected = llama.generate(IDS[:rows], attention_mask=MASK[:rows], **arguments)
    out = engine.generate(IDS[:rows], MASK[:rows], return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, expected)
    assert out.stats.accepted > 0


@BOTH_CACHES
@pytest.mark.parametrize("shape", ["chain", "few nodes", "adaptive"])
@pytest.mark.parametrize("sampling", ["sampled", "top_p"])
def test_the_same_seed_draws_the_same_tokens(llama, some_shared, on, shape, sampling):
    engine = on(make_engine(llama, some_shared, **SHAPES[shape]))
    arguments = {"max_new_tokens": 30} | SAMPLING[sampling]
    plain = engine.generate(IDS, MASK, speculate=False, **arguments)
    out = engine.generate(IDS, MASK, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, plain)
    assert out.stats.accepted > 0


@BOTH_CACHES
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_all_is_kept_of_the_target_under_other_ids(llama, on, acceptance, sampling):
    engine = on(make_engine(llama, renumbered(llama), acceptance=acceptance))
    stats = engine.generate(IDS, MASK, max_new_tokens=1 + 5 * 4, **NO_EOS, **SAMPLING[sampling]).stats
    assert stats.tokens_per_step == 5


def test_no_draft_of_a_wrong_table_is_kept(llama):
    draft_model, vocabulary = renumbered(llama)
    wrong = replace(vocabulary, draft_ids=vocabulary.draft_ids.roll(1))
    engine = make_engine(llama, (draft_model, wrong))
    assert engine.generate(IDS, MASK, max_new_tokens=21, do_sample=False, **NO_EOS).stats.tokens_per_step < 1.3


@pytest.mark.parametrize("allowed", [[7, 8, 9], "unshared"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_only_shared_tokens_are_drafted(llama, some_shared, allowed, acceptance):
    if allowed == "unshared":  # the draft model can draft nothing that is allowed
        allowed = (~some_shared[1].shared).nonzero()[:, 0].tolist()
    engine = make_engine(llama, some_shared, acceptance=acceptance)
    arguments = {"max_new_tokens": 20, "do_sample": True, "seed": 5} | NO_EOS
    banned = [[id] for id in range(VOCAB) if id not in allowed]
    plain = engine.generate(IDS, MASK, bad_words_ids=banned, speculate=False, **arguments)
    out = engine.generate(IDS, MASK, bad_words_ids=banned, **arguments)
    assert torch.isin(out.sequences[:, IDS.shape[1] :], torch.tensor(allowed)).all()
    if acceptance == "match":
        assert torch.equal(out.sequences, plain.sequences)
    if len(allowed) > 3:
        assert out.stats.accepted == 0


def draft_texts(vocabulary, tokens, lengths):
    """Return texts as the draft model reads them, padded, and their lengths."""
    texts = []
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        text = DraftText(vocabulary)
        text.length(row[:length])
        texts.append(text.ids)
    counts = [len(text) for text in texts]
    return torch.tensor([text + [0] * (max(counts) + 1 - len(text)) for text in texts]), torch.tensor(counts)


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 3, 99), (3, 3, 5)])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_draft_models_cache_follows_the_accepted_path(llama, some_shared, shape, sampled):
    beams, draft_len, budget = shape
    engine = make_engine(llama, some_shared, draft_len=draft_len, num_beams=beams, node_budget=budget)
    target, draft_model, vocabulary = engine.target, engine.draft_model, engine.draft_vocabulary
    length = MASK.sum(1)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    tokens[:, : IDS.shape[1]] = row_texts(IDS, MASK) * (torch.arange(IDS.shape[1]) < length[:, None])
    seeds = torch.tensor([1, 2, 3, 4]) if sampled else None
    sampler = Sampler(seeds, (), torch.ones(4), length, length + 40, torch.arange(VOCAB))
    caches = [target.new_cache(4), draft_model.new_cache(4)]
    for cache in caches:
        cache.reserve(160)
    prompts, lengths = draft_texts(vocabulary, tokens, length)
    accepted = []
    with torch.inference_mode():
        read_prompts(draft_model, prompts, lengths, caches[1], counts=lengths.tolist())
        state = prefill(tokens, length, target, caches[0], sampler)
        for _ in range(6):
            state, drawn = step(state, engine.proposer, target, caches[0], sampler, caches[1])
            accepted += drawn.path.accepted.tolist()
            texts, lengths = draft_texts(vocabulary, state.tokens, state.length)
            fresh = draft_model.new_cache(4)
            fresh.reserve(160)
            read_prompts(draft_model, texts, lengths, fresh)
            for pools in zip(caches[1].pools, fresh.pools, strict=True):
                stored, expected = (rearrange(pool.data, "g (b s) h d -> b s g h d", b=4) for pool in pools)
                for row, n in enumerate(lengths.tolist()):  # slot n - 1 is read again in the next step
                    assert_close_by_scale(stored[row, : n - 1], expected[row, : n - 1], 2e-5)
    assert len(set(accepted)) > 2  # or nothing was shown


@pytest.mark.parametrize("new", range(24, 32))
def test_what_is_found_again_was_read_by_both_models(llama, some_shared, new):
    engine = paged(make_engine(llama, some_shared, draft_len=3), blocks=200)
    prompt = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(5))
    arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    text = engine.generate(prompt, **arguments)
    graphs, draft_text = engine.graphs, DraftText(engine.draft_vocabulary)
    count = draft_text.length(text[0].tolist())
    table = graphs.draft_blocks.admit([*draft_text.ids, 1], count + 1)
    assert table.reused >= count - 2 * BLOCK_SIZE > 2 * BLOCK_SIZE
    fresh = engine.draft_model.new_cache(1)
    fresh.reserve(count)
    reused = PagedCache(graphs.draft_store, torch.tensor([table.blocks]).int())
    with torch.inference_mode():
        read_prompts(engine.draft_model, torch.tensor([draft_text.ids]), torch.tensor([count]), fresh)
    at = torch.arange(table.reused)
    for pool, expected in zip(graphs.draft_store.pools, fresh.pools, strict=True):
        assert_close_by_scale(pool[:, reused.slots(at[None])], expected.data[:, at], 2e-5)
    graphs.draft_blocks.release(table)
    again = engine.generate(text[:, :50], **arguments)
    assert torch.equal(again[:, : text.shape[1]], text)


def test_all_blocks_are_given_back(llama, some_shared):
    engine = paged(make_engine(llama, some_shared))
    engine.generate(IDS, MASK, max_new_tokens=20)
    assert engine.graphs.blocks.num_free_blocks == engine.graphs.draft_blocks.num_free_blocks == 199


def test_a_search_is_no_wider_than_what_is_shared(llama, some_shared):
    with pytest.raises(ArgumentError, match=f"can draft: {some_shared[1].shared_count}"):
        make_engine(llama, some_shared, num_beams=some_shared[1].shared_count + 1)


def trained(tokenizer, layers):
    """Return a tiny model that has learned the texts by heart, more or less."""
    model = tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=layers, initializer_range=0.05).train()
    ids = torch.tensor([id for text in TEXTS for id in tokenizer(text).input_ids])
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=0.01), torch.Generator().manual_seed(1)
    for _ in range(80):
        starts = torch.randint(0, len(ids) - 48, (16,), generator=generator)
        batch = torch.stack([ids[start : start + 48] for start in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


MAKERS = {
    "bytes 300": lambda: byte_level(TEXTS, 300),
    "bytes 700": lambda: byte_level(TEXTS, 700, special=["<bos>", "<eos>", "<|user|>"]),
    "sentencepiece": lambda: sentencepiece_like(TEXTS, 500),
}


@pytest.fixture(scope="module")
def learned():
    tokenizers = {name: make() for name, make in MAKERS.items()}
    return {name: (trained(tokenizer, 2), tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.mark.slow
@BOTH_CACHES
@pytest.mark.parametrize(
    ("target", "draft", "least"),
    [
        ("bytes 700", "sentencepiece", 1.3),
        ("sentencepiece", "bytes 700", 1.3),
        (
            "bytes 300",
            "sentencepiece",
            1.0,
        ),  # of a draft model that knows whole words, pieces of them are no likely draft
        ("bytes 700", "bytes 300", 1.0),
    ],
)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_models_that_know_the_same_texts_draft_for_each_other(learned, on, target, draft, least, sampling):
    (model, tokenizer), (draft_model, draft_tokenizer) = learned[target], learned[draft]
    engine = on(DraftTarget.from_pretrained(model, draft_model, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer))
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    batch = tokenizer(
        ["The quick fox", "The lazy river flows over the", "The", "Here we"], return_tensors="pt", padding=True
    )
    arguments = {"max_new_tokens": 40} | NO_EOS | SAMPLING[sampling]
    out = engine.generate(batch.input_ids, batch.attention_mask, **arguments)
    plain = engine.generate(batch.input_ids, batch.attention_mask, speculate=False, **arguments)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.tokens_per_step > least
