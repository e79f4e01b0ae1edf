"""Training of drafters that fill blocks: what is learnt is what is drafted, and what is written goes out and back."""

from copy import deepcopy
from itertools import count

import pytest
import torch

from helpers.dflash import BLOCK, DFLASH_FORMS, plain_block, random_block_drafter
from helpers.models import DRAFTER_ALONE, assert_close_by_scale, tiny_model
from helpers.training import (
    check_every_weight_is_learnt,
    check_resumed_training,
    check_texts_are_apart,
    command,
    known_text,
    learn_circle,
    loss_of,
    record,
    refused,
    round_circle,
    trained_logits,
    written,
)
from helpers.training import tiny_model as trained_base
from redrafter import DFlashDrafter, ReDrafter
from redrafter.convert.convert_checkpoint import main as convert_main
from redrafter.drafting.dflash_layers import MarkovHead
from redrafter.drafting.proposer import State
from redrafter.measure.replay import ValidationTexts
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.train.config import TrainConfig
from redrafter.train.head_loss import HeadLoss, chunk_loss
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.loss import Unroll
from redrafter.train.train_drafter import main
from redrafter.train.tree_choice import candidates
from redrafter.tree.sizes import TreeShape

DEPTH, LENGTH = 3, 14
FORMS = ("dflash", "dspark", "dflash2")
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


@pytest.mark.parametrize("form", ["speculators'", "DSpark", "DFlash2"])
def test_texts_packed_into_a_row_are_apart(form, model):
    check_texts_are_apart(random_block_drafter(**TRAINED[form]), model)


@pytest.mark.parametrize("form", TRAINED)
def test_every_weight_is_learnt_and_the_base_is_not(form, model):
    check_every_weight_is_learnt(random_block_drafter(**TRAINED[form]), model)


@pytest.mark.parametrize(("kind", "calls"), [("vanilla", 1), ("gated", 1), ("rnn", DEPTH)])
def test_only_a_recurrent_markov_head_is_computed_step_by_step(kind, calls, model, monkeypatch):
    made, advance = [], MarkovHead.advance
    monkeypatch.setattr(MarkovHead, "advance", lambda *args: made.append(1) or advance(*args))
    drafter = random_block_drafter(markov_rank=6, markov_type=kind, sample_from_anchor=True)
    trained_logits(drafter, model, known_text(drafter))
    assert len(made) == calls


def test_norms_compute_in_the_dtype_of_their_weights_under_autocast(model):
    """For other dtypes torch has no fused kernel."""
    drafter, dtypes = random_block_drafter(**TRAINED["DFlash"]), set()
    for module in drafter.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.register_forward_hook(lambda *args: dtypes.add(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        trained_logits(drafter, model, known_text(drafter))
    assert dtypes == {torch.float32}


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
    monkeypatch.setattr("redrafter.drafting.block_drafter.POSITIONS_ON_CPU", 3 * 2 * BLOCK)
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


@pytest.mark.parametrize("form", FORMS)
def test_a_few_steps_of_training_are_worth_many_tokens(form):
    base = trained_base(vocab=48, initializer_range=0.05, num_hidden_layers=3)
    circle = learn_circle(base, 40)
    config = TrainConfig(form=form, steps=60, draft_len=4, cpu=True, lr=1e-2, log_every=20, num_layers=1)
    drafter = new_drafter(base, config, None if form == "dflash2" else circle.sort().values)
    texts = ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20)
    before = texts.measure(drafter, TreeShape(3, 4, 13)).tokens_per_step
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    losses: list[float] = []
    result = train(base, drafter, batches, config, progress=lambda numbers: losses.append(numbers.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert texts.measure(drafter, TreeShape(3, 4, 13)).tokens_per_step > max(3.5, before)
    assert result.accuracy[3] > 0.8
    assert max(shape.depth for shape in candidates(drafter, 4)) == 4  # a block holds no more
    measured = texts.measure(drafter, TreeShape(3, 4, 13))
    engine = ReDrafter(Target(base), drafter.eval(), TreeShape(3, 4, 13), options=DRAFTER_ALONE)
    how = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    out = engine.generate(torch.tensor(texts.prompts), **how)
    assert torch.equal(out.sequences, torch.tensor(texts.texts.tokens))
    assert (measured.steps, measured.emitted) == (out.stats.steps, out.stats.emitted)


@pytest.mark.parametrize("form", FORMS)
def test_the_command_makes_a_drafter_that_loads_goes_out_and_comes_back(form, tmp_path, capsys):
    ids = [] if form == "dflash2" else ["--draft-vocab-size", "40"]
    words = command(tmp_path, "--form", form, "--num-layers", "1", "--steps", "4", "--lr", "1e-2")
    assert main([*words, *ids]) == 0
    base, out = tmp_path / "base", tmp_path / "out"
    assert "drafter of" in capsys.readouterr().out
    drafter = DFlashDrafter.from_pretrained(out)
    config = drafter.config
    assert (config.algorithm, config.drafts, config.trained_draft_len) == (form, 3, 3)
    assert (config.own_head, config.draft_vocab_size) == ((True, 40) if ids else (False, None))
    assert config.draft_len_per_beam <= 3
    assert "# DFlash drafter for base" in (out / "README.md").read_text()
    assert record(tmp_path)["config"]["form"] == form
    there = ["--drafter-model-dir", str(out), "--to", "speculators", "--output-dir", str(tmp_path / "theirs")]
    back = ["--drafter-model-dir", str(tmp_path / "theirs"), "--to", "drafter", "--output-dir", str(tmp_path / "back")]
    assert convert_main(there) == convert_main(back) == 0
    assert convert_main([*there, "--overwrite"]) == 0
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        texts, stats = written(base, out, **how)
        again, same = written(base, tmp_path / "back", **how)
        assert torch.equal(texts, again)
        assert (stats.steps, stats.drafted, stats.accepted_by_depth) == (
            same.steps,
            same.drafted,
            same.accepted_by_depth,
        )
    more = [*words[: -len(("--form", form, "--num-layers", "1", "--steps", "4", "--lr", "1e-2"))]]
    more += ["--drafter", str(out), "--output", str(tmp_path / "more"), "--steps", "2"]
    assert main([*more, "--lora-rank", "2"]) == 0
    assert "--form is the drafter's own" in refused(capsys, [*more, "--form", form, "--overwrite"])
    for dry in ([], ["--dry-run"]):
        error = refused(capsys, [*more, "--draft-len", "4", "--overwrite", *dry])
        assert "--draft-len 4 is more than the 3 tokens that a block of this drafter holds" in error
    assert main([*words, "--dry-run"]) == 0
    assert "the drafter's states" in capsys.readouterr().out


@pytest.mark.parametrize("form", FORMS)
def test_a_training_that_continues_ends_bit_for_bit_where_it_would_have(form, tmp_path, capsys):
    words = command(tmp_path, "--form", form, "--num-layers", "1", "--save-every", "2", "--validate-prompts", "0")
    check_resumed_training(words, tmp_path, capsys, DFlashDrafter)
    other = "dspark" if form == "dflash" else "dflash"
    again = ["--form", other, "--save-every", "2", "--validate-prompts", "0", "--resume", "--overwrite"]
    assert f"was made with --form {form}" in refused(capsys, command(tmp_path, "--steps", "4", *again))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--form dflash2 --draft-vocab-size 40", "dspark: leave it out with --form dflash2"),
        ("--form dflash --head-rank 8", "--head-rank is for --form recurrent: leave it out with --form dflash"),
        (
            "--form dspark --recipe small",
            "--recipe small is for a new drafter with a gated cell: leave it out with --form",
        ),
        ("--form dflash --num-layers 0", "--num-layers: a drafter of --form dflash has at least one layer"),
        ("--form dflash --target-layers none", "--target-layers: a drafter of --form dflash has at least one layer"),
    ],
)
def test_options_of_other_forms_are_refused_by_name(words, message, capsys, tmp_path):
    assert message in refused(capsys, command(tmp_path, *words.split()))


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
    drafter, results = random_block_drafter(**TRAINED[form], head_dim=16), []  # as small as FlexAttention's
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
