"""Training of drafters that fill blocks: what is learnt is what is drafted, and what is written goes out and back."""

from copy import deepcopy

import pytest
import torch

from helpers.dflash import BLOCK, DFLASH_FORMS, plain_block, random_block_drafter
from helpers.models import assert_close_by_scale, tiny_model
from helpers.training import (
    command,
    known_text,
    loss_of,
    refused,
    trained_logits,
)
from helpers.training import tiny_model as trained_base
from redrafter.drafting.proposer import State
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.train.config import TrainConfig
from redrafter.train.loss import HeadLoss, Unroll, chunk_loss

DEPTH, LENGTH = 3, 14
# The loss has no bound of logits.
TRAINED = {name: changes | {"logit_softcap": None} for name, changes in DFLASH_FORMS.items()}
TRAINED["narrower than a block"] = {"sliding_layers": [1], "sliding_window": 2}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize("form", TRAINED)
def test_what_is_trained_is_what_is_drafted(form, model):
    """Compare with a plain recomputation, and with the scores of a search at the same positions."""
    drafter = random_block_drafter(**TRAINED[form])
    text, target = known_text(drafter), Target(model)
    trained = trained_logits(drafter, model, text)  # [T, K, V']
    with Teacher(model, drafter.config.target_layers) as teacher, torch.no_grad():
        read = teacher.read_batch(text)
        contexts = drafter.read_texts(text, read.hidden, read.embedding)
    proposer = drafter.proposer(target, 1, DEPTH, 1 + DEPTH, None, False)
    zero = torch.zeros(1, dtype=torch.long)
    sampler = Sampler(
        seeds=None,
        processors=(),
        temperature=torch.ones(1),
        prompt=zero,
        limit=zero,
        ids=torch.arange(target.vocab_size),
    )
    for pending in (1, 5, LENGTH - DEPTH - 1):
        committed, drafts = text[0, : pending + 1], text[0, pending + 1 : pending + DEPTH]
        expected = plain_block(drafter, model, committed, drafts)
        assert_close_by_scale(trained[pending - 1], torch.stack(expected[:DEPTH]), 1e-5)
        row = torch.tensor([pending])
        state = State(text[:, pending:], zero, read.hidden[:, pending - 1], zero == 0)
        with torch.no_grad():
            expand = proposer.scores(state, sampler, None, contexts(zero, row))
            for k in range(DEPTH):
                scores = expand(k, text[:, pending + k, None], zero[None])[0, 0]
                seen = scores.isfinite()  # candidates, where there is a selector
                assert_close_by_scale(trained[pending - 1, k][seen], scores[seen], 1e-5)


def test_products_that_are_added_learn_as_autograd_learns_them():
    order = torch.Generator().manual_seed(0)
    shapes = ((6, 2, 4), (11, 4), (6, 2, 3), (11, 3))  # two inputs and two heads in turn
    factors = [torch.randn(shape, generator=order).requires_grad_() for shape in shapes]
    factors[1].requires_grad_(False)  # a head that is frozen
    teacher, position = torch.randn(9, 11, generator=order), torch.randint(9, (6, 2), generator=order)
    label, weight = torch.zeros_like(position), torch.rand(6, 2, generator=order)
    x, head, *terms = factors
    loss, *_ = HeadLoss.apply(x, head, teacher, position, label, weight, 1.0, 4, chunk_loss, *terms)
    log_q = sum(x @ head.T for x, head in zip(factors[::2], factors[1::2], strict=True)).log_softmax(dim=-1)
    log_p = teacher[position].log_softmax(dim=-1)
    expected = (weight * (log_p.exp() * (log_p - log_q)).sum(dim=-1)).sum()
    learnt = [factor for factor in factors if factor.requires_grad]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, learnt), torch.autograd.grad(expected * 3, learnt))


def test_rows_of_different_anchors_and_parts_give_the_sum_of_their_losses(model, monkeypatch):
    drafter = random_block_drafter(**TRAINED["DFlash2"])
    tokens = torch.cat([known_text(drafter), known_text(drafter, seed=1)])
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :6], mask[1, 9:] = False, False
    whole = loss_of(drafter, model, tokens, mask)
    alone = sum(loss_of(drafter, model, tokens[row, None], mask[row, None]) for row in range(2))
    assert_close_by_scale(whole, alone, 1e-5)
    monkeypatch.setattr("redrafter.drafting.block_drafter.POSITIONS_AT_ONCE", 3 * 2 * BLOCK)
    assert_close_by_scale(loss_of(drafter, model, tokens, mask), whole, 1e-5)
    assert not loss_of(drafter, model, tokens, torch.zeros_like(mask))


def test_a_head_of_the_base_with_a_bias_is_that_of_the_drafts():
    model = tiny_model("phi")
    assert model.get_output_embeddings().bias is not None
    torch.nn.init.normal_(model.get_output_embeddings().bias)
    drafter = random_block_drafter(**TRAINED["DFlash"])
    text = known_text(drafter)
    with Teacher(model, drafter.config.target_layers) as teacher, torch.no_grad():
        read = teacher.read_batch(text)
    factors = read.fill_head((read.hidden[..., : drafter.config.hidden_size], None))
    logits = sum(x @ weight.T for x, weight in zip(factors[::2], factors[1::2], strict=True))
    assert_close_by_scale(logits, read.logits, 1e-5)


def test_a_drafter_with_a_bound_of_its_logits_is_refused_by_name(tmp_path, capsys):
    words = command(tmp_path)
    sizes = {"vocab_size": trained_base().config.vocab_size, "target_layers": [0], "mask_token_id": 3}
    random_block_drafter(**sizes, logit_softcap=5.0).save_pretrained(tmp_path / "bound")
    error = refused(capsys, [*words, "--drafter", str(tmp_path / "bound"), "--draft-len", "3"])
    assert "a block drafter with logit_softcap=5.0 cannot be trained" in error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["speculators'", "recurrent after the anchor", "DFlash2"])
def test_a_gpu_learns_the_same_without_waiting(form, model):
    """There all positions are anchors, in parts that are computed again for the gradients."""
    drafter, results = random_block_drafter(**TRAINED[form], head_dim=16), []
    tokens = torch.cat([known_text(drafter), known_text(drafter, seed=1)])
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :6], mask[1, 9:] = False, False
    for device in ("cpu", "cuda"):
        there, base = deepcopy(drafter).to(device), deepcopy(model).to(device)
        with Teacher(base, drafter.config.target_layers) as teacher:
            output = teacher.read_batch(tokens.to(device))
        unroll = Unroll(there, TrainConfig(draft_len=DEPTH)).to(device)
        ids, weights = tokens.to(device), mask.to(device)
        unroll(ids, weights, output).loss.backward()  # the first one looks up frequencies
        there.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            loss = unroll(ids, weights, output).loss
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([loss.cpu(), *(weight.grad.cpu() for weight in there.parameters())])
    for one, other in zip(*results, strict=True):
        assert_close_by_scale(other, one, 1e-3)
