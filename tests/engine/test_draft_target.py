"""A second model drafts: whatever it says, the tokens are the target's; where it says the same, all of it is kept."""

import copy

import pytest
import torch
from einops import rearrange
from tokenizers import Tokenizer, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from helpers.generation import Collect, Steps
from helpers.models import CONTEXT, VOCAB, assert_close_by_scale, in_threads, paged, row_texts, tiny_model, uneven_batch
from helpers.steps import prefill, read_prompts
from redrafter import ArgumentError, CheckpointError, DraftTarget, MismatchError, UnsupportedError
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting.draft_length import AdaptiveDraftLength
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.step import step

NEW = 20
IDS, MASK = uneven_batch()
NO_EOS = {"eos_token_id": None, "return_dict_in_generate": True}
BOTH_CACHES = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
SHAPES = {
    "chain": {},
    "tree": {"num_beams": 3},
    "few nodes": {"num_beams": 3, "node_budget": 6},
    "adaptive": {"adaptive": True},
    "adaptive tree": {"num_beams": 3, "adaptive": True},
}
PAIRS = [
    ("llama", "gpt2"),
    ("gemma2", "llama"),
    ("qwen3", "qwen2"),
    ("mistral", "gemma3_text"),
    ("gpt_oss", "llama"),
    ("deepseek_v3", "llama"),
    ("llama", "deepseek_v3"),
    ("gpt_neox", "phi3"),
    ("llama", "mistral"),
    ("qwen3_moe", "olmo2"),
]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_engine",
    [
        DraftTarget.from_pretrained,
        lambda model, draft_model: DraftTarget.from_pretrained(model, draft_model, num_beams=3, draft_len=3),
        lambda model, _: DraftTarget.from_pretrained(model, blurred(model), num_beams=3, node_budget=6, adaptive=True),
        lambda model, draft_model: paged(DraftTarget.from_pretrained(model, draft_model, num_beams=2)),
    ],
    ids=["chain", "tree", "adaptive tree of a similar model", "paged tree"],
)
@pytest.mark.parametrize(("architecture", "draft_architecture"), PAIRS)
def test_greedy_equals_model_generate(architecture, draft_architecture, make_engine):
    model = tiny_model(architecture)
    engine = make_engine(model, tiny_model(draft_architecture, num_hidden_layers=1, layer_types=None))
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    ours, theirs, steps = Collect(), Collect(), Steps()
    expected = model.generate(IDS, attention_mask=MASK, streamer=theirs, **arguments)
    assert torch.equal(engine.generate(IDS, MASK, streamer=ours, **arguments), expected)
    assert torch.equal(torch.cat(ours.columns, 1), torch.cat(theirs.columns, 1))
    assert ours.ended
    out = engine.generate(IDS, MASK, streamer=steps, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, expected)
    assert steps.drafts == out.stats.accepted
    for row, text in steps.texts.items():
        assert text == expected[row, IDS.shape[1] :][: len(text)].tolist()
    assert torch.equal(engine.generate(IDS, MASK, speculate=False, **arguments), expected)
    for row in range(4):
        prompt = IDS[row : row + 1, MASK[row].argmax() :]
        assert torch.equal(engine.generate(prompt, **arguments), model.generate(prompt, **arguments))


@BOTH_CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "processing",
    [
        {"temperature": 0.8},
        {"temperature": [0.3, 0.7, 1.0, 1.6]},
        {"top_p": 0.8, "repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": [2, 11, 30, 31, 32]},
    ],
    ids=lambda processing: " ".join(processing),
)
def test_the_same_seed_draws_the_same_tokens_however_it_is_decoded(llama, similar, on, shape, processing):
    engine = on(DraftTarget.from_pretrained(llama, similar, **SHAPES[shape]))
    arguments = {"max_new_tokens": NEW, "do_sample": True} | processing
    plain = engine.generate(IDS, MASK, seed=11, speculate=False, **arguments)
    out = engine.generate(IDS, MASK, seed=11, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, plain)
    assert 0 < out.stats.accepted < out.stats.emitted
    for row in range(4):
        if isinstance(processing.get("temperature"), list):
            arguments["temperature"] = processing["temperature"][row]
        prompt = IDS[row : row + 1, MASK[row].argmax() :]
        alone = engine.generate(prompt, seed=11 + row, **arguments)[0, prompt.shape[1] :]
        assert torch.equal(alone, plain[row, IDS.shape[1] :][: len(alone)])


@BOTH_CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_several_sequences_may_be_returned(llama, similar, on, shape):
    engine = on(DraftTarget.from_pretrained(llama, similar, **SHAPES[shape]))
    arguments = {"max_new_tokens": NEW, "do_sample": True, "seed": 40, "num_return_sequences": 3}
    plain = engine.generate(IDS[:2], MASK[:2], speculate=False, **arguments)
    assert torch.equal(engine.generate(IDS[:2], MASK[:2], **arguments), plain)
    assert len({tuple(row.tolist()) for row in plain}) == 6


@BOTH_CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_the_context_may_be_filled(llama, similar, on, shape, sampling):
    engine = on(DraftTarget.from_pretrained(llama, similar, **SHAPES[shape]))
    arguments = {"max_length": CONTEXT, "eos_token_id": None} | sampling
    plain = engine.generate(IDS, MASK, speculate=False, **arguments)
    assert plain.shape[1] == CONTEXT
    assert torch.equal(engine.generate(IDS, MASK, **arguments), plain)


@BOTH_CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "sampling",
    [{"do_sample": False}, {"do_sample": True, "top_p": 0.9, "temperature": 0.7, "seed": 3}],
    ids=["greedy", "sampled"],
)
def test_scores_and_logits_are_those_of_plain_decoding(llama, similar, on, shape, sampling):
    engine = on(DraftTarget.from_pretrained(llama, similar, **SHAPES[shape]))
    arguments = {"max_new_tokens": NEW, "repetition_penalty": 1.2, "output_scores": True, "output_logits": True}
    arguments |= NO_EOS | sampling
    plain = engine.generate(IDS, MASK, speculate=False, **arguments)
    out = engine.generate(IDS, MASK, **arguments)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.accepted > 0
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)


@BOTH_CACHES
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 0.9},
        {"do_sample": True, "temperature": [0.6, 0.9, 1.2, 0.8]},
        {"do_sample": True, "top_p": 0.8},
        {"do_sample": True, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    ],
    ids=lambda sampling: " ".join(sampling),
)
@pytest.mark.parametrize("copied", [False, True])
def test_all_is_kept_of_a_draft_model_that_is_the_target(llama, on, acceptance, sampling, copied):
    steps, arguments = 5, {"max_new_tokens": 1 + 5 * 5} | NO_EOS | sampling
    draft_model = copy.deepcopy(llama) if copied else llama
    engine = on(DraftTarget.from_pretrained(llama, draft_model, draft_len=4, acceptance=acceptance))
    assert (engine.draft_model is engine.target) == (draft_model is llama)
    seed = None if not sampling["do_sample"] else 7
    stats = engine.generate(IDS, MASK, seed=seed, **arguments).stats
    assert stats.tokens_per_step == 5
    assert stats.accepted == stats.drafted == 4 * 4 * steps


@BOTH_CACHES
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 7}])
def test_most_is_kept_of_a_tree_too(llama, on, sampling):
    """Not all: what the target draws need not be among the likeliest of several steps."""
    engine = on(DraftTarget.from_pretrained(llama, copy.deepcopy(llama), draft_len=3, num_beams=3, node_budget=99))
    stats = engine.generate(IDS, MASK, max_new_tokens=1 + 4 * 6, **NO_EOS, **sampling).stats
    assert 3.5 < stats.tokens_per_step <= 4


@BOTH_CACHES
def test_an_unrelated_draft_model_changes_nothing_but_the_steps(llama, on):
    def write(draft_model):
        engine = on(DraftTarget.from_pretrained(llama, draft_model))
        return engine.generate(IDS, MASK, max_new_tokens=26, do_sample=True, seed=7, **NO_EOS)

    right, wrong = write(llama), write(tiny_model("gpt2", num_hidden_layers=1))
    assert torch.equal(right.sequences, wrong.sequences)
    assert right.stats.steps == 4 * 5
    assert wrong.stats.steps > 4 * 15


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 3, 99), (3, 3, 5)])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_draft_models_cache_follows_the_accepted_path(llama, similar, shape, sampled):
    beams, draft_len, budget = shape
    engine = DraftTarget.from_pretrained(llama, similar, draft_len=draft_len, num_beams=beams, node_budget=budget)
    target, draft_model = engine.target, engine.draft_model
    length = MASK.sum(1)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    tokens[:, : IDS.shape[1]] = row_texts(IDS, MASK) * (torch.arange(IDS.shape[1]) < length[:, None])
    seeds = torch.tensor([1, 2, 3, 4]) if sampled else None
    sampler = Sampler(seeds, (), torch.ones(4), length, length + 40, torch.arange(VOCAB))
    caches = [target.new_cache(4), draft_model.new_cache(4)]
    for cache in caches:
        cache.reserve(64)
    accepted = []
    with torch.inference_mode():
        state = prefill(tokens, length, target, caches[0], sampler, draft_model=draft_model, draft_cache=caches[1])
        for _ in range(6):
            state, drawn = step(state, engine.proposer, target, *caches[:1], sampler, caches[1])
            accepted += drawn.path.accepted.tolist()
            fresh = draft_model.new_cache(4)
            fresh.reserve(64)
            read_prompts(draft_model, state.tokens, state.length, fresh)
            for pools in zip(caches[1].pools, fresh.pools, strict=True):
                stored, expected = (rearrange(pool.data, "g (b s) h d -> b s g h d", b=4) for pool in pools)
                for row, n in enumerate(state.length.tolist()):  # slot n - 1 is read again in the next step
                    assert_close_by_scale(stored[row, : n - 1], expected[row, : n - 1], 2e-5)
    assert len(set(accepted)) > 2  # or nothing was shown


@pytest.mark.parametrize("beams", [1, 3])
def test_a_draft_model_reads_nothing_twice(llama, similar, beams):
    engine = DraftTarget.from_pretrained(llama, similar, draft_len=4, num_beams=beams, node_budget=9)
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


@BOTH_CACHES
@pytest.mark.parametrize("vocabulary", [90, 128])
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}, {"do_sample": True, "top_k": 3, "seed": 3}]
)
def test_a_draft_model_may_have_more_ids_or_fewer(llama, on, vocabulary, sampling):
    ids = IDS.where((torch.arange(IDS.shape[1]) % 3 > 0) | (MASK == 0), VOCAB - 1)  # some that the smaller one lacks
    draft_model = tiny_model("llama", vocab_size=vocabulary, num_hidden_layers=1)
    engine = on(DraftTarget.from_pretrained(llama, draft_model, num_beams=2))
    plain = engine.generate(ids, MASK, max_new_tokens=NEW, speculate=False, **sampling)
    assert torch.equal(engine.generate(ids, MASK, max_new_tokens=NEW, **sampling), plain)


def save(path, tokens, **changes):
    """Write a tiny model beside a tokenizer of these tokens."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    tiny_model("llama", **changes).save_pretrained(path)
    return str(path)


def test_models_that_write_with_other_tokens_are_refused(tmp_path):
    words = [f"word{id}" for id in range(VOCAB)]
    model = save(tmp_path / "model", words)
    padded = save(tmp_path / "padded", words, vocab_size=128, num_hidden_layers=1)
    other = save(tmp_path / "other", [*words[:5], "else", *words[6:]], num_hidden_layers=1)
    more = save(tmp_path / "more", [*words, "more"], vocab_size=128, num_hidden_layers=1)
    engine = DraftTarget.from_pretrained(model, padded)  # a larger table alone is padding
    expected = engine.generate(IDS, MASK, max_new_tokens=8, do_sample=False, speculate=False)
    assert torch.equal(engine.generate(IDS, MASK, max_new_tokens=8, do_sample=False), expected)
    with pytest.raises(MismatchError, match=r"97 tokens against 97, id 5 is 'word5' in one and 'else' in the other"):
        DraftTarget.from_pretrained(model, other)
    with pytest.raises(MismatchError, match="97 tokens against 98, id 97 is None in one and 'more' in the other"):
        DraftTarget.from_pretrained(model, more)
    with pytest.raises(MismatchError, match="word5"):  # loaded models have a name too
        DraftTarget.from_pretrained(engine.model, type(engine.model).from_pretrained(other))
    with pytest.raises(MismatchError, match="word5"):
        DraftTarget.from_pretrained(engine.target, other)
    with pytest.raises(CheckpointError, match="tokenizer"):
        (tmp_path / "other" / "tokenizer.json").unlink()
        (tmp_path / "other" / "tokenizer_config.json").unlink()
        DraftTarget.from_pretrained(model, other)
    DraftTarget.from_pretrained(model, tiny_model("gpt2"))  # without one there is nothing to compare


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        *(({"draft_len": bad}, ArgumentError, "draft_len") for bad in (0, -1, True, "4", 2.0, None)),
        *(({"num_beams": bad}, ArgumentError, "num_beams") for bad in (0, False, "3")),
        *(({"node_budget": bad}, ArgumentError, "node_budget") for bad in (0, True, 1.5)),
        *(({"adaptive": bad}, ArgumentError, "adaptive") for bad in ("yes", 1, None)),
        ({"acceptance": "x"}, ArgumentError, "acceptance must be one of match, rejection, got 'x'"),
        ({"acceptance": None}, ArgumentError, "acceptance"),
        ({"acceptance": "rejection", "num_beams": 2}, UnsupportedError, "num_beams=2"),
        ({"num_beams": VOCAB + 1}, ArgumentError, f"num_beams={VOCAB + 1}"),
        ({"max_input_len": 0}, ArgumentError, "max_input_len"),
    ],
)
def test_what_cannot_be_is_refused_by_name(llama, similar, arguments, error, named):
    with pytest.raises(error, match=named):
        DraftTarget.from_pretrained(llama, similar, **arguments)


def test_a_row_whose_drafts_are_kept_is_drafted_far():
    def after(*accepted, cost=0.1, rows=None, drafted=8):
        lengths = AdaptiveDraftLength(
            {length: length for length in range(1, 9)}, len(accepted), lambda rows: cost * rows
        )
        for _ in range(40):
            for row, kept in enumerate(accepted):
                if kept is not None:
                    lengths.observe(row, kept, drafted)
        return lengths.choose(rows or range(len(accepted)))

    assert after(8) == 8
    assert after(0) == 1
    assert 1 < after(2) < 8
    assert after(8, cost=1.5) == 1  # a draft that costs more than it can bring
    assert after(8, 8, cost=0.8) == after(8, 8, rows=[0], cost=1.6) == 1
    assert after(8, 8, rows=[0], cost=0.4) == 8  # the rows of the step count, not those that wait or have ended
    assert after(8, 0, rows=[0]) == 8
    assert after(8, 0, rows=[1]) == 1
    assert after(8, None) > 1  # of a row that stands still nothing is reported
    assert after(3, drafted=3) == 8  # what was not drafted was not refused either


def test_how_long_ago_decides_what_a_draft_counts():
    lengths = AdaptiveDraftLength({length: length for length in (1, 2, 4, 8)}, 1, lambda rows: 0.1)
    for _ in range(30):
        lengths.observe(0, 8, 8)
    assert lengths.choose([0]) == 8
    chosen = []
    for _ in range(40):
        lengths.observe(0, 0, 8)
        chosen.append(lengths.choose([0]))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1


@BOTH_CACHES
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 2}])
def test_an_adaptive_engine_drafts_less_where_drafts_are_not_kept(llama, on, sampling):
    unrelated = tiny_model("gpt2", num_hidden_layers=1)
    outs = []
    for adaptive in (False, True):
        engine = on(DraftTarget.from_pretrained(llama, unrelated, draft_len=6, adaptive=adaptive))
        outs.append(engine.generate(IDS, MASK, max_new_tokens=40, **NO_EOS, **sampling))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[1].stats.drafted < 0.5 * outs[0].stats.drafted


def test_a_tree_is_judged_by_how_deep_it_is(llama, monkeypatch):
    """Its 12 nodes are 4 drafts one below the other: when 4 are kept, none was refused."""
    monkeypatch.setattr(
        "redrafter.engine.draft_target.NODE_COST_FORWARDS", {"cpu": -0.99}
    )  # no cost and no doubt shortens it
    told, observe = [], AdaptiveDraftLength.observe
    monkeypatch.setattr(AdaptiveDraftLength, "observe", lambda self, *args: told.append(args) or observe(self, *args))
    engine = DraftTarget.from_pretrained(llama, llama, num_beams=3, node_budget=99, adaptive=True)
    engine.generate(IDS[:1], max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert len(told) > 5
    assert 1 < max(levels for *_, levels in told) <= 4


@BOTH_CACHES
@pytest.mark.parametrize("budget", [1, 3, None])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_search_may_be_much_wider_than_what_is_verified(llama, on, budget, rows):
    """The draft model's cache holds all that was searched: 1 + 10 * 7 nodes here, at the end of the last row too."""
    arguments = {"max_length": CONTEXT, "do_sample": False, "repetition_penalty": 1.2, "eos_token_id": None}
    arguments["suppress_tokens"] = [0]  # padding, which a penalty of transformers before 5.23 counts as text
    expected = llama.generate(IDS[:rows], attention_mask=MASK[:rows], **arguments)
    shape = {"num_beams": 10, "draft_len": 8, "node_budget": budget}
    engine = on(DraftTarget.from_pretrained(llama, copy.deepcopy(llama), **shape))
    assert torch.equal(engine.generate(IDS[:rows], MASK[:rows], **arguments), expected)


def test_a_wide_search_keeps_as_much_on_either_cache(llama):
    engine = DraftTarget.from_pretrained(llama, llama, num_beams=10, draft_len=4, node_budget=12)
    arguments = {"max_new_tokens": 24, "do_sample": False} | NO_EOS
    dense = engine.generate(IDS, MASK, **arguments).stats
    assert paged(engine).generate(IDS, MASK, **arguments).stats.accepted == dense.accepted


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
@BOTH_CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 1}])
def test_a_grammar_is_kept_to_and_never_asked_about_what_it_forbids(llama, similar, on, shape, raises, sampling):
    engine = on(DraftTarget.from_pretrained(llama, similar, **SHAPES[shape]))
    out = engine.generate(IDS[:1], logits_processor=[Counting(raises)], max_new_tokens=15, **NO_EOS, **sampling)
    assert out.sequences[0, IDS.shape[1] :].tolist() == [7 + n % 7 for n in range(15)]
    assert out.stats.steps < 14


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "do_sample": True}])
def test_requests_in_several_threads_disturb_none(llama, similar, sampling):
    engine = paged(DraftTarget.from_pretrained(llama, similar, num_beams=2, adaptive=True))
    arguments = {"max_new_tokens": 12, "do_sample": False} | sampling
    work = lambda row: engine.generate(IDS[row : row + 1], MASK[row : row + 1], seed=row, **arguments)  # noqa: E731
    expected, found = [work(row) for row in range(4)], in_threads(work, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert engine.graphs.blocks.num_free_blocks == 199


def test_a_text_that_the_draft_model_has_not_read_is_read_again(llama):
    engine = paged(DraftTarget.from_pretrained(llama, copy.deepcopy(llama)))
    prompt = (torch.arange(1, 42) * 13 % VOCAB)[None]
    arguments = {"max_new_tokens": 26, "do_sample": False} | NO_EOS
    plain = engine.generate(prompt, speculate=False, **arguments)
    for _ in range(2):  # the second time the text is found, in both models' blocks
        out = engine.generate(prompt, **arguments)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.tokens_per_step == 5
    assert engine.graphs.blocks.admit(prompt[0].tolist(), 60).reused == 32


def test_what_is_found_again_was_read_by_both_models(llama):
    """The last draft of a step that was kept whole is proposed and not yet read: here it ends a block."""
    engine = paged(DraftTarget.from_pretrained(llama, copy.deepcopy(llama), draft_len=3))
    prompt = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(5))
    text = engine.generate(prompt, max_new_tokens=29, do_sample=False, eos_token_id=None)
    graphs, count = engine.graphs, 3 * BLOCK_SIZE
    lease = graphs.blocks.admit([*text[0].tolist(), 5], 4 * BLOCK_SIZE)
    fresh = PagedCache(KVCachePool(engine.target.paged_shapes, 4), torch.tensor([[1, 2, 3]]).int())
    with torch.inference_mode():
        read_prompts(engine.target, text, torch.tensor([count]), fresh)
    at = torch.arange(lease.reused)[None]
    assert lease.reused >= 2 * BLOCK_SIZE
    for store in (graphs.store, graphs.draft_store):
        reused = PagedCache(store, torch.tensor([lease.blocks]).int())
        for pool, fresh_pool in zip(store.pools, fresh.pool.pools, strict=True):
            assert_close_by_scale(pool[:, reused.slots(at)], fresh_pool[:, fresh.slots(at)], 2e-5)


def test_limits_of_an_engine_hold(llama, similar):
    engine = DraftTarget(Target(llama), Target(similar), options=EngineOptions(max_seq_len=20))
    assert engine.generate(IDS, MASK, max_new_tokens=50, do_sample=False, eos_token_id=None).shape[1] <= 20 + 9
