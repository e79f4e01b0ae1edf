"""Drafters that attend to committed tokens: training and search agree, and neither sees what is not known yet."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from helpers.drafters import FORMS, random_drafter
from helpers.models import VOCAB, assert_close_by_scale, tiny_model
from helpers.training import known_text, trained_logits
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentDrafter, RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.measure.decode import Texts
from redrafter.measure.replay import ReplayStats, replay
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.loss import Unroll
from redrafter.tree.sizes import TreeShape

DEPTH, LENGTH = 3, 14
READING = ["context", "all"]  # forms that attend to committed tokens


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


@torch.no_grad()
def committed_state(drafter: RecurrentDrafter, target: Target, text: Tensor) -> tuple[Tensor, ContextWindow | None]:
    """Return the last hidden state of committed tokens `[1, T]`, `[1, F]`, and what a search reads of them."""
    with Teacher(target.model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(text)
    if drafter.context is None:
        return output.hidden[:, -1], None
    position, length = torch.arange(text.shape[1]), torch.tensor([text.shape[1]])
    keys, values = drafter.context.remember(drafter.fuse_hidden(output.hidden), output.embedding, position)
    window = ContextWindow.read_last(length, drafter.config.context_window, lambda at: (keys[0, at], values[0, at]))
    return output.hidden[:, -1], window


@torch.no_grad()
def drafted_logits(drafter: RecurrentDrafter, target: Target, text: Tensor, pending: int) -> Tensor:
    """Return the logits of a search that drafts a text's own tokens after the token at `pending`, `[K, V']`."""
    hidden, window = committed_state(drafter, target, text[:, :pending])
    ahead, ids, logits = text[0, pending:], drafter.draft_ids, []

    def draft_scores(step_logits: Tensor, _: object, k: int, __: object) -> Tensor:
        logits.append(step_logits[0, 0])
        token = ahead[k + 1] if ids is None else (ids == ahead[k + 1]).long().argmax()
        return one_hot(token, step_logits.shape[-1])[None, None].float() * 100

    zero = torch.zeros(1, dtype=torch.long)
    proposer = RecurrentProposer(drafter, target, 1, DEPTH, 1 + DEPTH)
    sampler = SimpleNamespace(draft_scores=draft_scores, draft_limits=None)
    state = State(ahead[None], zero, hidden, zero == 0)
    proposer.grow(state, sampler, proposer.scores(state, sampler, None, window))
    return torch.stack(logits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pending", [1, 5, LENGTH - DEPTH - 1])
def test_the_search_computes_the_logits_that_were_trained(target, form, pending):
    drafter = random_drafter(**FORMS[form])
    text = known_text(drafter)
    trained = trained_logits(drafter, target.model, text)[pending - 1]
    assert_close_by_scale(drafted_logits(drafter, target, text, pending), trained, 1e-5)


@pytest.mark.parametrize("form", READING)
def test_what_is_read_ends_with_the_window(target, form):
    drafter, text = random_drafter(**FORMS[form]), known_text(random_drafter(**FORMS[form]))
    logits = trained_logits(drafter, target.model, text)
    drafter.config.context_window += 1
    changed = (trained_logits(drafter, target.model, text) - logits).abs().amax(dim=(1, 2)) > 1e-4
    # A text of n committed tokens has n - 1 pairs.
    assert changed.nonzero().flatten().tolist() == list(range(drafter.config.context_window, LENGTH))


@pytest.mark.parametrize("form", READING)
@pytest.mark.parametrize("first", [1_000, 32_768, 131_072])
@torch.no_grad()
def test_far_from_the_beginning_of_a_text_a_draft_reads_what_it_would_near_it(form, first):
    drafter = random_drafter(**FORMS[form])
    attention, size = drafter.context, drafter.config.context_window
    generator = torch.Generator().manual_seed(0)
    hidden, embedding = torch.randn(2, 1, size + 1, drafter.config.hidden_size, generator=generator)
    states = torch.randn(DEPTH, 1, 2, drafter.config.hidden_size, generator=generator)

    def read(first: int) -> Tensor:
        keys, values = attention.remember(hidden, embedding, first + torch.arange(size + 1))
        length = torch.tensor([first + size + 1])
        window = ContextWindow.read_last(
            length, size, lambda at: (keys[:, (at - first)[0]], values[:, (at - first)[0]])
        )
        windows = [window._replace(length=window.length + step) for step in range(len(states))]
        return torch.stack([attention(*each) for each in zip(states, windows, strict=True)])

    assert_close_by_scale(read(first), read(0), 1e-2)  # angles of float32


@pytest.mark.parametrize("form", READING)
def test_texts_packed_into_a_row_are_apart(target, form):
    drafter = random_drafter(**FORMS[form])
    first, second = known_text(drafter, 8), known_text(drafter, 9, seed=1)
    segment = torch.tensor([[0] * 8 + [1] * 9])
    packed = trained_logits(drafter, target.model, torch.cat([first, second], dim=1), segment)
    assert_close_by_scale(packed[8:14], trained_logits(drafter, target.model, second)[:6], 1e-5)


@pytest.mark.parametrize("form", READING)
def test_anchors_that_fill_a_compiled_chunk_add_no_gradient(target, form, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr("redrafter.train.loss.chunk_anchors", lambda *_: 40)
    found = []
    for compiled in (False, True):
        drafter = random_drafter(**FORMS[form])
        tokens, mask = known_text(drafter), torch.ones(1, LENGTH, dtype=torch.bool)
        with Teacher(target.model, drafter.config.target_layers) as teacher:
            output = teacher.read_batch(tokens)
        config = TrainConfig(draft_len=DEPTH, compile=compiled)
        Unroll(drafter, config)(tokens, mask, output).loss.backward()
        found.append(torch.cat([weight.grad.flatten() for weight in drafter.parameters() if weight.grad is not None]))
    assert_close_by_scale(found[1], found[0], 1e-5)


def test_a_training_on_packed_rows_keeps_texts_apart(target):
    """Compare the losses of a text behind either of two others."""
    losses, config = [], TrainConfig(draft_len=DEPTH, cpu=True)
    for seed in (0, 1):
        drafter = random_drafter(**FORMS["context"])
        tokens = torch.cat([known_text(drafter, 8, seed), known_text(drafter, 9, seed=2)], dim=1)
        segment = torch.tensor([[0] * 8 + [1] * 9])
        batch = tokens, torch.arange(17)[None] > 8, segment  # nobody writes a text's first token
        losses.append(train(target.model, drafter, [batch], config, log=lambda _: None).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_new_drafter_begins_as_one_that_reads_nothing(target):
    plain = TrainConfig(target_layers=(0, 2), head_rank=8, context_window=0)
    reading = replace(plain, context_window=6)
    drafter, other = new_drafter(target.model, reading).eval(), new_drafter(target.model, plain).eval()
    missing, unexpected = drafter.load_state_dict(other.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("context.") for name in missing)
    text = known_text(drafter)
    torch.testing.assert_close(trained_logits(drafter, target.model, text), trained_logits(other, target.model, text))


@torch.no_grad()
def draft_chain(drafter: RecurrentDrafter, target: Target, text: list[int]) -> list[int]:
    """Return the K tokens that are drafted after a text whose last token is pending, with nothing else known."""
    hidden, window = committed_state(drafter, target, torch.tensor([text[:-1]]))
    zero = torch.zeros(1, dtype=torch.long)
    sampler = SimpleNamespace(draft_scores=lambda logits, *_: logits, draft_limits=None)
    proposer = RecurrentProposer(drafter, target, 1, DEPTH, 1 + DEPTH)
    state = State(torch.tensor([text[-1:]]), zero, hidden, zero == 0)
    return proposer.grow(state, sampler, proposer.scores(state, sampler, None, window)).tokens[0, 1:].tolist()


@pytest.mark.parametrize("form", READING)
def test_a_replay_accepts_what_is_drafted_from_the_tokens_before_alone(target, form):
    drafter, accepts = random_drafter(**FORMS[form]), [2, 0, 3, 1, 3, 0, 2]
    texts = [[5, 6, 7, 8], [9, 8, 7]]
    for text in texts:
        for count in accepts:
            drafts = draft_chain(drafter, target, text)
            text += [*drafts[:count], (drafts[count % DEPTH] + 1) % VOCAB if count < DEPTH else 4]
    stats = replay(drafter, target, Texts(texts, [3, 2], [False, False]), [TreeShape(1, DEPTH, 1 + DEPTH)])[0]
    expected = [sum(count > depth for count in accepts) for depth in range(DEPTH)]
    assert [found.accepted_by_depth for found in stats] == [expected, expected]
    assert [found.steps for found in stats] == [len(accepts)] * 2


@pytest.mark.variant  # 200 steps
@pytest.mark.parametrize(("window", "least", "most"), [(0, 1, 1.2), (48, 3.5, 4)], ids=["without", "with"])
def test_what_it_learns_is_to_find_what_came_next_before(target, window, least, most):
    """Train on random texts that are written twice, of which nothing else tells the second half, and replay others."""
    config = TrainConfig(
        draft_len=DEPTH, distill=0, lr=1e-2, steps=200, cpu=True, target_layers=(), context_window=window
    )
    random, drafter = torch.Generator().manual_seed(0), new_drafter(target.model, config)
    halves = torch.randint(3, VOCAB, (config.steps + 1, 16, 24), generator=random)
    *batches, others = torch.cat([halves, halves], dim=2)
    mask = (torch.arange(48) > 24).expand(16, -1)
    train(target.model, drafter, [(tokens, mask) for tokens in batches], config, log=lambda _: None)
    texts, shape = Texts(others.tolist(), [25] * 16, [False] * 16), TreeShape(1, DEPTH, 1 + DEPTH)
    found = ReplayStats.sum(shape, replay(drafter.eval(), target, texts, [shape])[0])
    assert least <= found.tokens_per_step <= most
