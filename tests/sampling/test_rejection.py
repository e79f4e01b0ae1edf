"""Rejection sampling draws from the target's distribution: counted over many draws, and every way to break it shows."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from helpers.generation import ON_BOTH_CACHES, same_alone
from helpers.models import paged, tiny_model, uneven_batch
from redrafter import DraftTarget
from redrafter.sampling.noise import DRAFT
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import chain

VOCAB, NEW = 7, 3
TEXTS = torch.tensor(list(product(range(VOCAB), repeat=NEW)))
PROMPT, SHORT = torch.tensor([[3, 5, 4]]), torch.tensor([[4, 6]])
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "num_key_value_heads": 1, "intermediate_size": 16}
SHAPE |= {"initializer_range": 0.4}


@pytest.fixture(scope="module")
def models():
    return tiny_model("llama", num_hidden_layers=2, **SHAPE), tiny_model("qwen2", num_hidden_layers=1, **SHAPE)


def processed(model, texts, *, temperature=1.0, top_k=0):
    """Log-probabilities `[T, L, V]` of what follows each position."""
    with torch.no_grad():
        scores = model(texts).logits.double() / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
    return scores.log_softmax(-1)


def law(model, prompt=PROMPT, **sampling):
    """Return the probability of each of TEXTS after the prompt, from the target alone."""
    texts = torch.cat([prompt.expand(len(TEXTS), -1), TEXTS], dim=1)
    log_probs = processed(model, texts, **sampling)[:, prompt.shape[1] - 1 : -1]  # [T, NEW, V]
    return log_probs.gather(2, TEXTS[:, :, None]).sum(dim=(1, 2)).exp().numpy()


def draw(engine, draws, *, batch=10_000, ids=PROMPT, mask=None, **arguments):
    """Return new tokens `[draws, NEW]` and the statistics of each call, under seeds 0, 1, ..."""
    arguments = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "eos_token_id": None} | arguments
    mask = torch.ones_like(ids) if mask is None else mask  # id 0 is no padding here
    ids, mask = (x.repeat(batch // len(ids), 1) for x in (ids, mask))
    outs = [
        engine.generate(ids, mask, seed=start, return_dict_in_generate=True, **arguments)
        for start in range(0, draws, batch)
    ]
    return torch.cat([out.sequences[:, ids.shape[1] :] for out in outs]), [out.stats for out in outs]


def distance(drawn, expected):
    """How far counts are from a law: their total variation, in that of as many true draws; and how many standard
    deviations their chi-square lies above its mean."""
    place = (drawn * VOCAB ** torch.arange(drawn.shape[1] - 1, -1, -1)).sum(dim=1)
    counts = place.bincount(minlength=len(expected)).numpy()
    assert not counts[expected == 0].any()
    draws, expected = counts.sum(), expected / expected.sum()
    variation = lambda x: np.abs(x / draws - expected).sum() / 2  # noqa: E731
    true = [variation(x) for x in np.random.default_rng(0).multinomial(draws, expected, size=20)]
    often = expected * draws >= 5  # the others are one cell
    cells = [np.append(x[often], x[~often].sum()) for x in (counts, expected * draws)]
    square = sum((c - e) ** 2 / e for c, e in zip(*cells, strict=True) if e > 0)
    free = often.sum() - 1 + (cells[1][-1] > 0)
    return variation(counts) / np.mean(true), (square - free) / np.sqrt(2 * free)


def assert_drawn_from(drawn, expected):
    variation, deviations = distance(drawn, expected)
    assert variation < 1.3, (variation, deviations)
    assert deviations < 5, (variation, deviations)


def one_position(draws):
    """Return what `draw_residual` puts after a pending token, drafts included, and p and q."""
    p, q = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    rows, position = torch.zeros(draws).long(), torch.full((draws,), 9)
    sampler = Sampler(torch.arange(draws), (), torch.ones(draws), rows, rows, torch.arange(6))
    drafts = (q + sampler.stream(DRAFT).noise(position - 1, 1)).argmax(-1)  # [B, 1]
    tree = replace(chain(torch.cat([rows[:, None], drafts], dim=1)), sampled_from=q.expand(draws, 1, 6))
    drawn = sampler.draw_residual(p.expand(draws, 2, 6), sampler.noise(position - 1, 2), tree, position)
    return drawn, drafts, p.exp(), q.exp()


@pytest.mark.parametrize("column", [0, 1], ids=["after the pending token", "after the draft, which is the last"])
def test_what_follows_one_node_has_the_targets_distribution(column):
    drawn, _, p, _ = one_position(200_000)
    frequencies = drawn[:, column].bincount(minlength=6) / len(drawn)
    sigma = (p * (1 - p) / len(drawn)).sqrt()
    assert (frequencies - p).abs().sum() < 3 * (sigma * (2 / torch.pi) ** 0.5).sum()
    assert ((frequencies - p) ** 2 / p).sum() * len(drawn) < 5 + 5 * 10**0.5  # five degrees of freedom


def test_a_draft_is_kept_as_often_as_the_two_distributions_overlap():
    drawn, drafts, p, q = one_position(200_000)
    overlap = torch.minimum(p, q).sum()
    assert 0.3 < overlap < 0.9  # or nothing was shown
    kept = (drawn[:, :1] == drafts).float().mean()
    assert abs(kept - overlap) < 5 * (overlap * (1 - overlap) / len(drawn)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft_len", "draws", "sampling"),
    [(3, 200_000, {}), (2, 50_000, {}), (1, 50_000, {}), (3, 50_000, {"temperature": 0.7, "top_k": 4})],
)
def test_texts_have_the_targets_distribution(models, draft_len, draws, sampling):
    engine = DraftTarget.from_pretrained(*models, draft_len=draft_len, acceptance="rejection")
    drawn, stats = draw(engine, draws, **sampling)
    assert_drawn_from(drawn, law(models[0], **sampling))
    assert 0.2 < sum(s.accepted for s in stats) / sum(s.emitted for s in stats) < 0.8  # drafts are kept, and are not


@pytest.mark.slow
@ON_BOTH_CACHES
def test_rows_of_other_prompts_and_temperatures_have_their_own_distributions(models, on):
    ids = torch.cat([PROMPT, torch.nn.functional.pad(SHORT, (1, 0))])
    batch, temperatures = 2000, [0.8, 1.3]
    engine = DraftTarget.from_pretrained(*models, acceptance="rejection")
    engine = on(engine)
    if engine.memory is not None:
        batch = 50
    arguments = {"ids": ids, "mask": torch.tensor([[1, 1, 1], [0, 1, 1]]), "temperature": temperatures * (batch // 2)}
    drawn, _ = draw(engine, 20_000 if batch > 50 else 2_000, batch=batch, **arguments)
    for row, prompt in enumerate((PROMPT, SHORT)):
        assert_drawn_from(drawn[row::2], law(models[0], prompt, temperature=temperatures[row]))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [VOCAB - 1, VOCAB + 2])
def test_ids_that_one_model_lacks_are_drawn_as_often_as_they_should(models, vocabulary):
    draft_model = tiny_model("qwen2", num_hidden_layers=1, **SHAPE | {"vocab_size": vocabulary})
    engine = DraftTarget.from_pretrained(models[0], draft_model, acceptance="rejection")
    assert_drawn_from(draw(engine, 20_000)[0], law(models[0]))


@pytest.mark.slow
def test_as_many_drafts_are_kept_as_the_two_distributions_overlap(models):
    engine = DraftTarget.from_pretrained(*models, draft_len=1, acceptance="rejection")
    drawn, stats = draw(engine, 50_000, max_new_tokens=2)
    first = torch.arange(VOCAB)[:, None]
    texts = torch.cat([PROMPT.expand(VOCAB, -1), first], dim=1)
    p, q = (processed(model, texts).exp() for model in models)
    expected = (p[0, -2] * torch.minimum(p, q)[:, -1].sum(-1)).sum()
    kept = sum(call_stats.accepted for call_stats in stats) / len(drawn)
    assert abs(kept - expected) < 5 * (expected * (1 - expected) / len(drawn)) ** 0.5


def test_a_seed_draws_the_same_tokens_twice_and_in_any_batch(llama):
    ids, mask = uneven_batch()
    arguments = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    engine = DraftTarget.from_pretrained(llama, tiny_model("qwen2"), acceptance="rejection")
    together = engine.generate(ids, mask, seed=5, **arguments)
    assert torch.equal(engine.generate(ids, mask, seed=5, **arguments), together)
    assert torch.equal(paged(engine).generate(ids, mask, seed=5, **arguments), together)
    same_alone(engine, ids, mask, together, seed=[5, 6, 7, 8], **arguments)


def test_a_node_budget_cuts_a_sampled_chain(models):
    engine = paged(DraftTarget.from_pretrained(*models, draft_len=4, node_budget=3, acceptance="rejection"))
    drawn, stats = draw(engine, 2_000, batch=50)
    assert_drawn_from(drawn, law(models[0]))
    assert all(call_stats.drafted == 2 * call_stats.steps for call_stats in stats)
