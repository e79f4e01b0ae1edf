"""A head in two stages: rough scores choose candidates, and the head scores those alone."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from helpers.drafters import random_drafter
from helpers.models import HIDDEN, VOCAB, check_texts, paged, tiny_model, with_tree
from redrafter import RecurrentDrafter
from redrafter.drafting.proposer import State
from redrafter.drafting.shortlist import head_rows
from redrafter.errors import CheckpointError
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.model.linear_layers import quantize_linears
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler

ROWS, BEAMS, DEPTH, TEMPERATURE = 3, 3, 3, 0.7
FORMS = [{}, {"draft_vocab_size": 40}, {"head_rank": 8, "recurrence": "gated", "context_window": 4}]


def start(drafter: RecurrentDrafter, sampled: bool = False, beams: int = BEAMS):
    """Return a proposer, the state of a few rows, a sampler and its noise."""
    torch.manual_seed(2)
    target = Target(tiny_model("llama"))
    proposer = drafter.eval().proposer(target, beams, DEPTH, 1 + beams * DEPTH, None, False)
    tokens, length = torch.randint(3, VOCAB, (ROWS, 8)), torch.full((ROWS,), 7)
    state = State(tokens, length, torch.randn(ROWS, drafter.feature_size), torch.ones(ROWS, dtype=torch.bool))
    sampler = Sampler(None, (), torch.full((ROWS,), TEMPERATURE), length, length, torch.arange(VOCAB))
    return proposer, state, sampler, torch.randn(ROWS, DEPTH + 1, VOCAB) if sampled else None


def whole_head(drafter: RecurrentDrafter) -> RecurrentDrafter:
    """Return a drafter of the same weights whose head scores all ids."""
    config = type(drafter.config).from_dict(drafter.config.to_dict() | {"head_shortlist": None})
    made = RecurrentDrafter(config)
    made.load_state_dict({name: x for name, x in drafter.state_dict().items() if not name.startswith("shortlist")})
    return made


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
@pytest.mark.parametrize("beams", [1, BEAMS])
def test_with_all_ids_as_candidates_the_tree_is_that_of_the_whole_head(form, sampled, beams):
    drafter = random_drafter(**form, head_shortlist=VOCAB, head_shortlist_rank=4)
    trees = []
    for made in (drafter, whole_head(drafter)):
        proposer, state, sampler, noise = start(made, sampled, beams)
        trees.append(proposer.grow(state, sampler, proposer.scores(state, sampler, noise, None)))
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_candidates_are_the_best_of_the_rough_scores_and_have_the_scores_of_the_head(form, sampled):
    drafter = random_drafter(**form, head_shortlist=6, head_shortlist_rank=4)
    proposer, state, sampler, noise = start(drafter, sampled)
    found = proposer.scores(state, sampler, noise, None)(0, state.pending, torch.zeros(ROWS, 1, dtype=torch.long))
    whole, *_ = start(whole_head(drafter))
    exact = whole.scores(state, sampler, noise, None)(0, state.pending, torch.zeros(ROWS, 1, dtype=torch.long))
    assert found.ids.shape == (ROWS, 1, 6)
    assert_close(found.scores, exact.gather(-1, found.ids))
    x, _ = drafter.advance(
        proposer.target.embedding(state.pending), None, drafter.begin(drafter.fuse_hidden(state.hidden)[:, None])
    )
    w = drafter.state_dict()
    rough = x @ (w["shortlist.head.weight"] @ w["shortlist.proj.weight"]).T
    if sampled:
        names = slice(None) if drafter.draft_ids is None else drafter.draft_ids
        rough = rough / TEMPERATURE + noise[:, :1, names]
    assert torch.equal(found.ids.sort().values, rough.topk(6).indices.sort().values)
    spread = found.spread(exact.shape[-1])
    assert torch.equal(spread.isfinite().sum(dim=-1), torch.full((ROWS, 1), 6))
    assert_close(spread.gather(-1, found.ids), found.scores)


def test_a_search_of_more_beams_than_candidates_gets_as_many():
    proposer, state, sampler, noise = start(random_drafter(head_shortlist=2, head_shortlist_rank=4), beams=5)
    tree = proposer.grow(state, sampler, proposer.scores(state, sampler, noise, None))
    assert tree.tokens.shape == (ROWS, 1 + 5 * DEPTH)
    assert all(len(set(row[1:6].tolist())) == 5 for row in tree.tokens)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [1, 9])
def test_texts_are_those_of_the_model_whatever_is_on_the_shortlist(form, size):
    model = tiny_model("llama")
    engine = with_tree(model, random_drafter(**form, head_shortlist=size, head_shortlist_rank=3), 4, 3)
    check_texts(engine, paged(engine))


def test_rows_of_a_head_in_fp8_are_those_that_its_product_has():
    drafter = random_drafter(head_shortlist=6, head_shortlist_rank=16)
    quantize_linears(drafter)
    ids, x = torch.randint(0, VOCAB, (2, 3, 5)), torch.randn(2, 3, 2 * HIDDEN)
    found = (head_rows(drafter.lm_head, ids, x.dtype) @ round_inputs(x).values[..., None])[..., 0]
    assert_close(found, drafter.lm_head(x).gather(-1, ids), atol=1e-4, rtol=1e-4)
    engine = with_tree(tiny_model("llama"), drafter, 4, 3)
    check_texts(engine)


def test_a_checkpoint_without_the_rough_scores_is_refused(tmp_path):
    random_drafter(head_shortlist=6, head_shortlist_rank=4).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["shortlist.head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys shortlist\.head\.weight$"):
        RecurrentDrafter.from_pretrained(tmp_path)


def test_a_draft_reads_the_rough_scores_and_the_rows_of_the_candidates():
    make = partial(random_drafter, draft_beams=3)
    whole, two = make().draft_bytes(4), make(head_shortlist=2, head_shortlist_rank=4).draft_bytes(4)
    width = 2 * HIDDEN
    head, rough, rows = VOCAB * width, 4 * (width + VOCAB), 2 * (1 + 3 * 3) * width
    assert whole - two == 4 * (4 * (head - rough) - rows)
