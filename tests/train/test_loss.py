"""What the trainer minimises: its value and its gradient are those of the chain that drafting runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from helpers.drafters import FORMS, random_drafter
from helpers.models import HIDDEN, VOCAB, assert_close_by_scale, tiny_drafter, tiny_model
from helpers.steps import read_prompts
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher, TeacherOutput
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_config, new_drafter
from redrafter.train.loss import (
    CHUNK_BYTES,
    CHUNK_PREDICTIONS_ON_CPU,
    DECAY,
    HeadLoss,
    Unroll,
    chunk_anchors,
    chunk_loss,
    find_anchors,
    target_mask,
    total_weight,
)

DISTILLS = [1, 0, 0.7]


def loss_of_rollout(logits: Tensor, teacher: Tensor, labels: list[int], weights: list[float], distill: float) -> Tensor:
    """Compute the loss of the steps from one anchor by the definition, from logits and teacher `[K, V']`."""
    total = logits.new_zeros(())
    for k, label in enumerate(labels):
        p, log_q = teacher[k].softmax(-1), logits[k].log_softmax(-1)
        loss = distill * (p * (p.log() - log_q)).sum()
        total = total + weights[k] * (loss if label < 0 else loss - (1 - distill) * log_q[label])
    return total


def counts_of(logits: Tensor, label: Tensor, weights: Tensor) -> tuple[list[int], list[int]]:
    seen, right = ([0] * label.shape[1] for _ in range(2))
    for a in range(len(label)):
        for k in range(label.shape[1]):
            if weights[a, k] == 0:
                break
            seen[k] += 1
            if logits[a, k].argmax() != label[a, k]:
                break
            right[k] += 1
    return seen, right


def reading_of(model: torch.nn.Module, drafter: RecurrentDrafter, tokens: Tensor) -> TeacherOutput:
    with Teacher(model, drafter.config.target_layers) as teacher:
        return teacher.read_batch(tokens)


def reader(
    drafter: RecurrentDrafter, hidden: Tensor, embedding: Tensor
) -> Callable[[int], Callable[[Tensor], Tensor] | None]:
    """Return what gives, for a draft step, what a state `[D]` reads of T committed tokens, as the search reads it.

    Args:
        drafter: The drafter; for one that attends to no tokens, what is returned gives None.
        hidden: Hidden states of the tokens, `[T, F]`.
        embedding: Embeddings of the tokens, `[T, D]`.
    """
    if drafter.context is None:
        return lambda step: None
    keys, values = drafter.context.remember(drafter.fuse_hidden(hidden), embedding, torch.arange(len(hidden)))
    length, size = torch.tensor([len(hidden)]), drafter.config.context_window
    window = ContextWindow.read_last(length, size, lambda at: (keys[at], values[at]))
    windows = [window._replace(length=window.length + step) for step in range(8)]
    return lambda step: lambda state: drafter.context(state[None, None], windows[step])[0, 0]


def grads(drafter: RecurrentDrafter) -> dict[str, Tensor]:
    """Return the drafter's gradients and reset them."""
    found = {name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None}
    drafter.zero_grad()
    return found


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("distill", DISTILLS)
def test_loss_and_gradient_are_those_of_the_plain_definition(distill, chunk):
    generator = torch.Generator().manual_seed(0)
    anchor_count, steps, width, vocabulary = 7, 4, 5, 11
    x = torch.randn(anchor_count, steps, width, generator=generator).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator)
    head = head.roll(-int((x[4, 0] @ head.T).argmax()), 0).requires_grad_()  # id 0 is likeliest where it is not known
    teacher = torch.randn(20, vocabulary, generator=generator) * 2
    place = torch.randint(20, (anchor_count, steps), generator=generator)
    with torch.no_grad():
        ranked = (x @ head.T).argsort(dim=-1, descending=True)
    rank = torch.randint(4, (anchor_count, steps, 1), generator=generator)  # labels within the beams and outside
    rank[:3, 0] = 0
    label = ranked.gather(-1, rank).squeeze(-1)
    label[1, 1] = label[4, 0] = -1
    label[6] = ranked[6, :, 0]  # every guess is right
    weights = 0.8 ** torch.arange(steps).expand(anchor_count, -1).clone()
    weights[2, 2:] = weights[5] = 0
    loss, seen, right = HeadLoss.apply(x, head, teacher, place, label, weights, distill, chunk, chunk_loss)
    (loss * 0.37).backward()
    exact_x, exact_head = (tensor.detach().double().requires_grad_() for tensor in (x, head))
    logits, target_logits = exact_x @ exact_head.T, teacher.double()[place]
    rows = [
        loss_of_rollout(logits[a], target_logits[a], label[a].tolist(), weights[a].tolist(), distill)
        for a in range(anchor_count)
    ]
    expected = torch.stack(rows).sum()
    (expected * 0.37).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.grad.double(), exact_head.grad, rtol=1e-5, atol=1e-6)
    assert (seen.tolist(), right.tolist()) == counts_of(logits, label, weights)
    assert 0 < right[0] < seen[0]


def test_a_compiled_loss_is_one_graph_with_the_same_result():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(6, 3, 30, generator=generator), torch.randn(20, 30, generator=generator)
    position, label = (torch.randint(20, (6, 3), generator=generator) for _ in range(2))
    arguments = (logits, teacher, position, label, torch.ones(6, 3), 0.7)
    compiled = torch.compile(chunk_loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), chunk_loss(*arguments))


def test_distributions_without_overlap_have_a_finite_loss_and_gradient():
    teacher, logits = torch.zeros(1, 8), torch.zeros(1, 1, 8)
    teacher[0, 0], logits[0, 0, 1] = 300.0, 300.0  # probabilities that are 0 in float32
    one = torch.zeros(1, 1, dtype=torch.long)
    found = chunk_loss(logits, teacher, one, one, torch.ones(1, 1), 1.0)
    assert found.loss > 0.9
    assert found.loss.isfinite()
    assert found.gradient.isfinite().all()


BASES = [("llama", form) for form in FORMS] + [("gemma2", "all"), ("gpt2", "published"), ("gpt2", "all")]


@pytest.mark.parametrize(("base", "form"), BASES)
def test_loss_is_that_of_the_chain_that_drafting_runs(base, form, monkeypatch):
    """Compute every number by `Target`, `RecurrentDrafter.step` and the definition, one at a time."""
    model = tiny_model(base)
    target, drafter = Target(model), random_drafter(**FORMS[form], draft_beams=30)
    layers, known = drafter.config.target_layers, drafter.draft_ids
    target.read_aux_hidden(layers)
    ids = list(range(VOCAB)) if known is None else known.tolist()
    config = TrainConfig(draft_len=3, distill=0.7)
    monkeypatch.setattr("redrafter.train.loss.chunk_anchors", lambda *_: 2)
    text = torch.tensor([[5, 2, 40, 64, 7, 64, 33, 12, 90]])
    hidden, logits = [], []
    for length in range(1, 10):
        cache = target.new_cache(1)
        cache.reserve(length)
        with torch.no_grad():
            got = read_prompts(target, text[:, :length], torch.tensor([length]), cache)
        logits.append(got[0][0, ids])
        hidden.append(got[1][0])
    total = torch.zeros(())
    for i in range(7):
        state, said, own, taken = None, [], [], drafter.fuse_hidden(hidden[i])
        read = reader(drafter, torch.stack(hidden[: i + 1]), target.embedding(text[0, : i + 1]).detach())
        for k in range(1, min(3, 7 - i) + 1):
            x, state = drafter.advance(
                target.embedding(text[0, i + k]).detach(), state, drafter.begin(taken), read(k - 1)
            )
            said.append(drafter.lm_head(x))
            token = int(text[0, i + k + 1])
            own.append(ids.index(token) if token in ids else -1)
        target_logits = torch.stack(logits[i + 1 : i + 1 + len(said)])
        total = total + loss_of_rollout(torch.stack(said), target_logits, own, [1, DECAY, DECAY**2], 0.7)
    total.backward()
    expected = grads(drafter)
    model.train()  # as a caller may leave it; there is dropout in gpt2
    found = Unroll(drafter, config)(text, torch.ones(1, 9, dtype=torch.bool), reading_of(model, drafter, text))
    found.loss.backward()
    assert found.attempted[0] == 7 > found.correct[0] >= found.attempted[1]
    torch.testing.assert_close(found.loss, total, rtol=1e-4, atol=1e-5)
    gradients = grads(drafter)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close_by_scale(gradient, expected[name], 5e-5)
    assert known is None or not set(text[0].tolist()).issubset(ids)


def test_targets_stay_inside_one_stretch_of_the_mask():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0]]).bool()
    expected = torch.zeros(1, 9, 2, dtype=torch.bool)
    expected[0, 1, 0] = expected[0, 1, 1] = True  # pending at 2, drafts at 3 and 4
    expected[0, 2, 0] = True  # pending at 3, draft at 4
    expected[0, 5, 0] = True  # pending at 6, draft at 7
    assert torch.equal(target_mask(mask, 2), expected)


def test_anchors_on_a_device_weigh_what_those_on_the_host_do():
    mask = torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) < 0.7
    chosen, weights = find_anchors(mask, 3, multiple=7)
    assert len(chosen) % 7 == 0
    assert len(chosen) > (weights[:, 0] > 0).sum() == target_mask(mask, 3)[..., 0].sum()
    spread = torch.zeros(33, 3).index_add(0, chosen, weights)
    torch.testing.assert_close(spread, (target_mask(mask, 3) * torch.tensor([1, DECAY, DECAY**2])).flatten(0, 1))
    meta, all_weights = find_anchors(mask.to("meta"), 3)
    assert meta.shape == (33,)
    assert all_weights.shape == (33, 3)
    torch.testing.assert_close(total_weight(mask, TrainConfig(draft_len=3)), spread.sum())


def test_user_turns_and_padding_never_contribute():
    model, drafter = tiny_model("llama"), random_drafter()
    unroll, tokens = Unroll(drafter, TrainConfig(draft_len=3, distill=0.5)), torch.randint(3, VOCAB, (2, 14))
    mask = torch.tensor([[0] * 4 + [1] * 4 + [0] * 2 + [1] * 4, [1] * 9 + [0] * 5]).bool()
    read = reading_of(model, drafter, tokens)
    before = unroll(tokens, mask, read).loss
    noisy = [x + torch.randn_like(x) * ~mask[:, :, None] for x in (read.embedding, read.logits)]
    others = torch.where(mask, tokens, tokens.flip(1))
    # A prompt's last hidden state does belong to a turn.
    assert torch.equal(unroll(others, mask, TeacherOutput(read.hidden, *noisy)).loss, before)
    ours = tokens.clone()
    ours[0, 6] = (ours[0, 6] + 1) % VOCAB
    assert not torch.equal(unroll(ours, mask, read).loss, before)
    more = [torch.nn.functional.pad(tokens[1:], (0, pad), value=7) for pad in (0, 6)]
    wider = [torch.nn.functional.pad(mask[1:], (0, pad)) for pad in (0, 6)]
    short, padded = (unroll(t, m, reading_of(model, drafter, t)).loss for t, m in zip(more, wider, strict=True))
    torch.testing.assert_close(short, padded)


def test_a_batch_without_a_target_moves_nothing():
    drafter, tokens = random_drafter(), torch.randint(3, VOCAB, (1, 8))
    none = torch.zeros(1, 8, dtype=torch.bool)
    found = Unroll(drafter, TrainConfig())(tokens, none, reading_of(tiny_model("llama"), drafter, tokens))
    found.loss.backward()
    assert found.loss == 0
    assert not found.attempted.any()
    assert not any(x.any() for x in grads(drafter).values())


@pytest.mark.parametrize("form", FORMS)
def test_in_bfloat16_the_masters_get_gradients_close_to_those_of_float32(form):
    model, drafter = tiny_model("llama"), random_drafter(**FORMS[form])
    for weights in drafter.parameters():
        weights.data.mul_(0.5)  # as of a trained drafter's size; rounding is compared, not saturation
    generator = torch.Generator().manual_seed(2)
    tokens, mask = torch.randint(3, VOCAB, (3, 20), generator=generator), torch.ones(3, 20, dtype=torch.bool)
    read, unroll = reading_of(model, drafter, tokens), Unroll(drafter, TrainConfig(draft_len=3))
    expected = unroll(tokens, mask, read).loss
    expected.backward()
    exact = grads(drafter)
    with torch.autocast("cpu", torch.bfloat16):
        found = unroll(tokens, mask, read).loss
    found.backward()
    assert found.dtype == torch.float32
    assert 0 < abs(found.item() / expected.item() - 1) < 0.02
    for name, gradient in grads(drafter).items():
        assert gradient.dtype == torch.float32
        assert drafter.get_parameter(name).dtype == torch.float32
        assert (gradient - exact[name]).norm() < 0.05 * exact[name].norm(), name


def test_in_bfloat16_the_gradient_of_the_head_is_summed_in_float32():
    head = torch.zeros(8, 4, requires_grad=True)
    zeros = torch.zeros(600, 1, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        ones = torch.ones(600, 1)
        x = ones[..., None].expand(600, 1, 4)
        at = torch.zeros(1, 8), zeros, zeros, ones
        loss, _, _ = HeadLoss.apply(x, head, *at, 0.0, 1, chunk_loss)
    loss.backward()
    torch.testing.assert_close(head.grad[0], torch.full((4,), 600 * (1 / 8 - 1)))  # bfloat16 would stop at 256


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that is made, without views and given tensors."""

    def __init__(self, *given: Tensor):
        super().__init__()
        self.given, self.numbers = {tensor.untyped_storage().data_ptr() for tensor in given}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest_of(vocabulary: int, config: TrainConfig) -> tuple[int, int]:
    """Count the numbers of the largest tensor made in a forward and backward, and of the largest kept in between."""
    drafter, tokens = tiny_drafter(vocab_size=vocabulary, exit_dim=16), torch.randint(vocabulary, (3, 20))
    read = TeacherOutput(torch.randn(3, 20, HIDDEN), torch.randn(3, 20, HIDDEN), torch.randn(3, 20, vocabulary))
    unroll, kept = Unroll(drafter, config), []
    with Largest(read.logits, *drafter.parameters()) as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            found = unroll(tokens, torch.ones(3, 20, dtype=torch.bool), read)
        kept += [gradient.numel() for gradient in found.loss.grad_fn.gradients]
        found.loss.backward()
    return largest.numbers, max(kept)


def test_logits_of_more_than_a_chunk_are_never_in_memory(monkeypatch):
    vocabulary, steps = 3000, 4
    head, everything = 16 * vocabulary, 54 * steps * vocabulary  # of 3 rows of 18 anchors
    for anchor_count in (5, 10):
        config = TrainConfig(draft_len=steps)
        with monkeypatch.context() as patched:
            patched.setattr("redrafter.train.loss.chunk_anchors", lambda *_, count=anchor_count: count)
            largest, kept = largest_of(vocabulary, config)
        assert largest == anchor_count * steps * vocabulary < everything / 5
        assert kept == head
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert CHUNK_BYTES // 2 < chunk_anchors(vocabulary, steps, gpu) * steps * vocabulary * 4 <= CHUNK_BYTES
    assert chunk_anchors(CHUNK_BYTES, steps, gpu) == 1  # however large a vocabulary
    assert chunk_anchors(vocabulary, steps, cpu) * steps == CHUNK_PREDICTIONS_ON_CPU
    assert largest_of(vocabulary, TrainConfig(draft_len=steps))[0] == everything  # as much as is allowed


def test_compiled_all_chunks_have_one_size_and_the_loss_is_the_same(monkeypatch):
    sizes = []

    def compiled(compute):
        return lambda logits, *rest: sizes.append(len(logits)) or compute(logits, *rest)

    monkeypatch.setattr(torch, "compile", compiled)
    drafter, tokens = random_drafter(), torch.randint(3, VOCAB, (2, 13))
    read, mask = reading_of(tiny_model("llama"), drafter, tokens), torch.ones(2, 13, dtype=torch.bool)
    config = TrainConfig(draft_len=2)
    monkeypatch.setattr("redrafter.train.loss.chunk_anchors", lambda *_: 6)
    plain, padded = (Unroll(drafter, replace(config, compile=c))(tokens, mask, read) for c in (False, True))
    assert sizes == [6] * 4
    assert torch.equal(plain.attempted, padded.attempted)
    assert torch.equal(plain.correct, padded.correct)
    torch.testing.assert_close(plain.loss, padded.loss)


# New drafters


@pytest.mark.parametrize("recurrence", ["apple", "gated"])
def test_a_new_drafter_starts_simple_and_sees_its_tokens(recurrence):
    model = tiny_model("llama", initializer_range=0.01)
    config = TrainConfig(num_layers=3, seed=4, recurrence=recurrence, target_layers=(0, 2), head_rank=8)
    drafter = new_drafter(model, config)
    assert not any(weight.any() for weight in drafter.layers.parameters())
    assert len(drafter.layers) == 3
    hidden, embedding = torch.randn(50, 3 * HIDDEN), model.get_input_embeddings().weight
    assert torch.equal(drafter.fuse_hidden(hidden), hidden[:, :HIDDEN])
    assert drafter.dtype == torch.float32
    if recurrence == "apple":
        read, beside = drafter.rnn_w(embedding).std(), 1.0
    else:
        of_embedding, _, of_hidden = drafter.rnn_gate.weight.split(HIDDEN, dim=1)
        read, beside = (embedding @ of_embedding.T).std(), (hidden[:, :HIDDEN] @ of_hidden.T).std()
    assert 0.7 < read / beside < 1.4
    assert read > 0.2
    same, other = new_drafter(model, config), new_drafter(model, replace(config, seed=5))
    assert torch.equal(same.lm_head.weight, drafter.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, drafter.lm_head.weight)


@pytest.mark.parametrize(
    ("width", "depth", "layers", "exit_dim", "rank", "heads", "kv_heads"),
    [
        (32, 2, [0], 64, None, 4, 1),
        (512, 6, [1, 3, 4], 1024, 512, 4, 1),
        (2048, 16, [4, 8, 12], 4096, 512, 8, 1),
        (4096, 32, [8, 16, 24], 8192, 1024, 16, 2),
        (8192, 80, [20, 40, 60], 8192, 1024, 32, 4),
    ],
)
def test_a_new_drafter_has_the_best_form_sized_by_its_base(width, depth, layers, exit_dim, rank, heads, kv_heads):
    base = LlamaConfig(hidden_size=width, num_hidden_layers=depth)
    found = new_config(base, TrainConfig())
    assert (found.recurrence, found.num_draft_layers, found.context_window) == ("gated", 3, 512)
    assert (found.target_layers, found.exit_dim, found.head_rank) == (layers, exit_dim, rank)
    assert (found.context_heads, found.context_kv_heads) == (heads, kv_heads)
    assert new_config(base, TrainConfig(head_rank=0)).head_rank is None
    assert [new_config(base, TrainConfig(length=length)).context_window for length in (128, 2048)] == [128, 512]
    form = new_config(base, TrainConfig(recurrence="apple"))
    assert (form.num_draft_layers, form.target_layers, form.exit_dim) == (2, [], exit_dim)
    assert form.head_rank is form.context_window is None


OPTIONS = {"num_draft_layers", "recurrence", "target_layers", "head_rank", "draft_vocab_size"}


@pytest.mark.parametrize("form", [form for form, fields in FORMS.items() if OPTIONS.issuperset(fields)])
def test_a_new_drafter_has_the_form_that_was_asked_for(form):
    named = {name.replace("num_draft_layers", "num_layers"): value for name, value in FORMS[form].items()}
    # A form here is the published one but for what it names.
    named = {"recurrence": "apple", "num_layers": 2, "context_window": 0, "head_rank": 0, "target_layers": ()} | named
    asked = {name: value for name, value in named.items() if name != "draft_vocab_size"}
    model, ids = tiny_model("llama"), torch.arange(3, 43) if "draft_vocab_size" in FORMS[form] else None
    drafter = new_drafter(model, TrainConfig(draft_len=3, **asked), ids)
    shape = {name: value.shape for name, value in tiny_drafter(**FORMS[form]).state_dict().items()}
    assert {name: value.shape for name, value in drafter.state_dict().items()} == shape
    assert drafter.config.draft_len_per_beam == 3
    assert ids is None or torch.equal(drafter.draft_ids, ids)
    tokens = torch.randint(3, VOCAB, (2, 12))
    read = reading_of(model, drafter, tokens)
    found = Unroll(drafter, TrainConfig(draft_len=3))(tokens, torch.ones(2, 12, dtype=torch.bool), read)
    found.loss.backward()
    silent = {name for name, _ in drafter.named_parameters() if name.startswith("context.")} - {"context.out.weight"}
    for name, gradient in grads(drafter).items():
        assert gradient.isfinite().all()
        assert gradient.any() == (name not in silent), name  # what is read is nothing until `out` is not zero
