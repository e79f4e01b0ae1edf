"""A replay counts what decoding reports, on texts that the base wrote once."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from helpers.dflash import DFLASH_FORMS, random_block_drafter
from helpers.eagle import EAGLE_FORMS, random_head
from helpers.models import DRAFTER_ALONE, HIDDEN, VOCAB, tiny_drafter, tiny_model
from helpers.training import learn_circle, round_circle
from redrafter import RecurrentDrafter, ReDrafter, boxed_pair
from redrafter.checkpoints.tokenizers import end_tokens, load_tokenizer
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import UNDRAFTED, State
from redrafter.engine.engine import Engine
from redrafter.measure import decode as decode_module
from redrafter.measure import replay as replay_module
from redrafter.measure.decode import Texts, repeated_share, write_texts
from redrafter.measure.replay import Positions, ReplayStats, ValidationTexts, count_accepted, replay
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.train.config import TrainConfig
from redrafter.train.loop import train
from redrafter.tree.sizes import TreeShape

SHAPES = [
    *(TreeShape(3, depth, nodes) for depth, nodes in ((4, 13), (4, 6), (4, 99), (2, 7), (2, 4), (1, 1))),
    *(TreeShape(1, depth, nodes) for depth, nodes in ((4, 5), (4, 3), (2, 3))),
    TreeShape(5, 3, 9),
]


OTHERS = {
    "EAGLE": partial(random_head, **EAGLE_FORMS["speculators"]),
    **{form: partial(random_block_drafter, **DFLASH_FORMS[form]) for form in ("speculators'", "recurrent", "DFlash2")},
}


def random_prompts(lengths: tuple[int, ...] = (1, 9, 4, 17, 6)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def patterned() -> tuple[PreTrainedModel, RecurrentDrafter]:
    """Train a base to go round a circle of ids, one of which ends its texts, and its drafter."""
    model, drafter = tiny_model("llama", initializer_range=0.05), tiny_drafter()
    circle, mask = learn_circle(model, 60), torch.ones(16, 24, dtype=torch.bool)
    config = TrainConfig(draft_len=3, lr=1e-2, warmup=0, cpu=True)
    train(model, drafter, [(round_circle(circle, 16, step), mask) for step in range(25)], config, log=lambda _: None)
    model.generation_config.eos_token_id = [2, int(circle[7])]
    return model, drafter


def random_pair(draft_vocab: int | None = None, **changes: object) -> tuple[PreTrainedModel, RecurrentDrafter]:
    """Make a pair with so many ids that end texts that some texts do end."""
    model, drafter = tiny_model("llama"), tiny_drafter(draft_vocab_size=draft_vocab, **changes)
    model.generation_config.eos_token_id = [2, 11, 12, 13, 14]
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(
            torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort()[0]
        )
    return model, drafter


# The walk


@pytest.mark.costly
@pytest.mark.parametrize(
    "pair, temperature",
    [("patterned", 0.6), *product(("patterned", "random", "reduced", "layered", "context", *OTHERS), (0.0, 1.0))],
)
def test_a_replay_counts_what_generate_reports(request, pair, temperature, monkeypatch):
    """Compare text by text, on unequal prompts decoded as one batch, some of which end early."""
    monkeypatch.setattr(replay_module, "MAX_BATCH_TEXTS", 2)
    monkeypatch.setattr(replay_module, "MAX_BATCH_POSITIONS", 7)
    layered = {"target_layers": [0, 1], "recurrence": "gated", "head_rank": 16}
    context = {"context_window": 6, "context_head_dim": 8}
    changes = {"reduced": {"draft_vocab": 40}, "layered": layered, "context": layered | context}.get(pair, {})
    model, drafter = request.getfixturevalue("patterned") if pair == "patterned" else random_pair(**changes)
    if pair in OTHERS:
        drafter = OTHERS[pair]()
    elif drafter.context is not None:
        torch.nn.init.normal_(drafter.context.out.weight, std=3)  # or nothing that is read would show
    target, prompts = Target(model), random_prompts()
    texts = write_texts(Engine(target, UNDRAFTED), prompts, 23, temperature, seed=5, batch_size=2)
    assert 0 < sum(texts.ended) < len(prompts) or temperature == 0
    found = replay(drafter, target, texts, SHAPES)
    ids = torch.tensor([[0] * (17 - len(prompt)) + prompt for prompt in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 5} if temperature else {}
    for shape, replayed in zip(SHAPES, found, strict=True):
        engine = ReDrafter(target, drafter, shape, options=DRAFTER_ALONE)
        arguments = {"do_sample": False, "max_new_tokens": 23, "return_dict_in_generate": True} | sampling
        out = engine.generate(ids, (ids > 0).long(), **arguments)
        for row, (text, mine, stats) in enumerate(zip(texts.continuations, replayed, out.stats.rows, strict=True)):
            assert out.sequences[row, 17 : 17 + len(text)].tolist() == text
            assert mine.tokens_per_step == stats.tokens_per_step
            for name in ("steps", "drafted", "accepted", "emitted", "accepted_by_depth"):
                assert getattr(mine, name) == getattr(stats, name), (str(shape), row, name)
    assert sum(each.steps for each in found[0]) > 5
    if pair == "patterned" or temperature == 1:
        assert sum(each.accepted for each in found[0]) > 5


def replay_chain(drafter: RecurrentDrafter, model: PreTrainedModel, *texts: list[int]) -> ReplayStats:
    """Replay a chain of three drafts along texts with prompts of one token, and add up the statistics."""
    shape, given = TreeShape(1, 3, 4), Texts(list(texts), [1] * len(texts), [False] * len(texts))
    return ReplayStats.sum(shape, replay(drafter, Target(model), given, [shape])[0])


def test_a_replay_ends_with_the_text(monkeypatch):
    """A drafter proposes 0 forever on texts of zeros.

    Drafts past the end of a text must count neither as accepted nor as rejected.
    """
    model, drafter = tiny_model("llama"), tiny_drafter()
    zero = torch.zeros(VOCAB).index_fill(0, torch.tensor(0), 1.0)
    monkeypatch.setattr(drafter, "step", lambda e, s, h, *_: (zero.expand(*e.shape[:-1], VOCAB), e))
    found = replay_chain(drafter, model, [5] + [0] * 7, [5, 0, 0], [5, 0])
    # The first: three drafts and one more, then the two that are left. The second: the one that is left.
    assert (found.steps, found.emitted, found.accepted_by_depth) == (3, 7, [3, 2, 1])
    assert found.tried == [3, 2, 1]
    assert found.acceptance == [1, 1, 1]
    missing = replay_chain(drafter, model, [5, 0, 7, 0, 0, 0])
    # Nothing of the first step, two of the second; the third draft had no room.
    assert missing.tried == [2, 1, 1]
    assert missing.accepted_by_depth == [1, 1, 1]
    assert ReplayStats.sum(TreeShape(1, 3, 4)).acceptance == [None] * 3


def positions(pending: Tensor, hidden: Tensor, length: int) -> Positions:
    """Make positions whose text is `length` times the pending token `[A, 1]`."""
    zero = torch.zeros(len(pending), dtype=torch.long)
    sampler = Sampler(None, (), torch.ones(len(zero)), zero, zero, torch.arange(VOCAB))
    return Positions(State(pending.repeat(1, length), zero, hidden, zero == 0), sampler, None, None)


def test_final_beams_keep_the_prefixes_of_the_beams_that_survive():
    """Compare with paths written out one by one, for the deepest search and a shallower one."""
    model, drafter = random_pair()
    target, rows, generator = Target(model), 200, torch.Generator().manual_seed(3)
    pending = torch.randint(3, VOCAB, (rows, 1), generator=generator)
    at = positions(pending, torch.randn(rows, HIDDEN, generator=generator), 7)
    deepest = RecurrentProposer(drafter, target, 4, 5, 21).propose(at.state, at.sampler, None, None, None)
    # The text follows some node of the whole lattice, so that all depths are reached, and then takes other tokens.
    for row in range(rows):
        path = _path(deepest, row, int(torch.randint(1, 21, (), generator=generator)))
        at.state.tokens[row, 1:] = torch.tensor(path + [-1] * (6 - len(path)))
    shapes = [TreeShape(4, 5, None), TreeShape(4, 3, None), TreeShape(4, 5, 21)]
    accepted, drafted = count_accepted(drafter, target, at, shapes)
    for column, depth in ((0, 5), (1, 3)):
        for row in range(rows):
            text = at.state.tokens[row, 1:].tolist()
            beams = [_path(deepest, row, 1 + 4 * (depth - 1) + beam) for beam in range(4)]
            prefixes = {tuple(beam[:length]) for beam in beams for length in range(1, depth + 1)}
            longest = max((len(one) for one in prefixes if text[: len(one)] == list(one)), default=0)
            assert (accepted[row, column], drafted[row, column]) == (longest, len(prefixes))
    assert (accepted[:, 0] < accepted[:, 2]).any()
    assert (drafted[:, 0] < 20).any()
    assert accepted[:, 0].max() == 5


def _path(tree, row: int, node: int) -> list[int]:
    tokens = []
    while node:
        tokens.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens


def test_one_forward_of_the_base_and_one_search_of_a_width_serve_all_shapes(patterned, monkeypatch):
    model, drafter = patterned
    target, calls = Target(model), []
    texts = write_texts(Engine(target, UNDRAFTED), random_prompts(), 12)
    for owner, name in ((Teacher, "read_batch"), (drafter, "step")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, of=real: calls.append(n) or of(*args))
    replay(
        drafter,
        target,
        texts,
        [TreeShape(3, 4, nodes) for nodes in (13, 7, 2)] + [TreeShape(3, 2, 5), TreeShape(3, 4, None)],
    )
    assert calls == ["read_batch"] + ["step"] * 4


def test_memory_bounds_what_is_done_at_once_and_not_the_result(monkeypatch):
    model, drafter = random_pair()
    target, sizes, seen, read = Target(model), [], [], Teacher.read_batch
    texts = write_texts(Engine(target, UNDRAFTED), random_prompts(), 20, 1.0)
    given = Texts(random_prompts((6, 26, 7, 20, 19)), [2] * 5, [False] * 5)
    whole, other = replay(drafter, target, texts, SHAPES), replay(drafter, target, given, SHAPES[-1:])

    def sized(drafter, target, at, shapes):
        sizes.append(len(at.state.length))
        return count_accepted(drafter, target, at, shapes)

    monkeypatch.setattr(replay_module, "count_accepted", sized)
    monkeypatch.setattr(replay_module, "MAX_BATCH_BYTES", VOCAB * (16 * 5 + 32 * 4) * 3)  # positions of the drafter
    assert replay(drafter, target, texts, SHAPES) == whole
    assert max(sizes) == 3
    monkeypatch.setattr(replay_module, "MAX_BATCH_BYTES", VOCAB * 4 * 50)  # texts of the base
    monkeypatch.setattr(
        Teacher, "read_batch", lambda self, tokens: seen.append(tuple(tokens.shape)) or read(self, tokens)
    )
    assert replay(drafter, target, given, SHAPES[-1:]) == other
    assert seen == [(2, 7), (2, 20), (1, 26)]


def test_a_chain_is_cut_at_its_end_even_where_rounding_scores_a_child_above_its_parent(monkeypatch):
    """A drafter is almost sure of id 7, then of id 8; the base draws 7 and then another id."""
    model, drafter = random_pair()
    rows, depth = 50, []

    def step(embedding, state, hidden, read, embedded):
        depth.append(7 if state is None else 8)
        peak = torch.linspace(5, 40, rows)[:, None, None].expand(rows, 1, VOCAB)
        sure = one_hot(torch.tensor(depth[-1]), VOCAB) * (peak + 8.1)
        return sure if state is None else sure * 9, embedding

    monkeypatch.setattr(drafter, "step", step)
    at = positions(torch.full((rows, 1), 5), torch.zeros(rows, HIDDEN), 4)
    at.state.tokens[:, 1:] = torch.tensor([7, 9, 9])
    accepted, drafted = count_accepted(drafter, Target(model), at, [TreeShape(1, 2, 2)])
    assert accepted.flatten().tolist() == drafted.flatten().tolist() == [1] * rows


def test_validation_texts_are_written_once_and_measure_any_drafter(patterned, monkeypatch):
    model, drafter = patterned
    shape = TreeShape(3, 4, 13)
    mute = ValidationTexts(Target(model), random_prompts(), 12, end_ids=range(VOCAB))
    assert mute.count == mute.measure(drafter, shape).steps == 0
    validation_texts = ValidationTexts(Target(model), random_prompts(), 12)
    assert validation_texts.texts == write_texts(Engine(Target(model), UNDRAFTED), random_prompts(), 12)
    monkeypatch.setattr(decode_module, "timed_run", None)  # from here on nothing may be written
    first = validation_texts.measure(drafter.train(), shape)
    assert drafter.training
    assert validation_texts.measure(drafter.eval(), shape) == first
    assert first == ReplayStats.sum(shape, replay(drafter, validation_texts.target, validation_texts.texts, [shape])[0])
    assert validation_texts.count == sum(len(own) > 1 for own in validation_texts.texts.continuations) > 0
    assert validation_texts.measure(tiny_drafter(), shape).accepted < first.accepted


# Texts


def test_texts_say_how_they_ended_and_do_not_depend_on_their_batch():
    model, _ = random_pair()
    target, prompts = Target(model), random_prompts()
    alone, together = (
        write_texts(Engine(target, UNDRAFTED), prompts, 20, 1.0, seed=9, batch_size=rows) for rows in (1, 5)
    )
    assert alone == together
    assert alone.prompt_lengths == [1, 9, 4, 17, 6]
    assert alone.seeds == [9, 10, 11, 12, 13]
    assert [text[:start] for text, start in zip(alone.tokens, alone.prompt_lengths, strict=True)] == prompts
    ends = {2, 11, 12, 13, 14}
    assert alone.ended == [own[-1] in ends for own in alone.continuations]
    assert any(alone.ended)
    assert not any(set(own[:-1]) & ends for own in alone.continuations)
    said = []
    other = write_texts(
        Engine(target, UNDRAFTED), prompts, 20, 1.0, seed=9, end_ids=[3], batch_size=2, report=said.append
    )
    assert other.ended == [own[-1] == 3 for own in other.continuations]
    assert said == [0, 2, 4, 5]
    assert all(len(own) == 20 or own[-1] == 3 for own in other.continuations)


def test_only_a_temperature_stands_between_model_and_text():
    model, _ = random_pair()
    plain = [
        write_texts(Engine(Target(model), UNDRAFTED), random_prompts(), 16, temperature) for temperature in (0.0, 1.0)
    ]
    model.generation_config.update(repetition_penalty=3.0, top_k=1, top_p=0.1, temperature=0.3)
    assert [
        write_texts(Engine(Target(model), UNDRAFTED), random_prompts(), 16, temperature) for temperature in (0.0, 1.0)
    ] == plain


def test_repetition_is_of_runs_that_occurred_before_in_the_same_text():
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 5], [7]], 4) == pytest.approx(1 / 7)
    assert repeated_share([[5] * 10], 4) == pytest.approx(6 / 7)
    assert repeated_share([[1, 2, 3]], 4) is None


def test_a_tokenizer_may_know_another_end_than_its_model():
    model, _ = random_pair()
    tokenizer = load_tokenizer(boxed_pair())
    tokenizer.eos_token = "<|pad|>"
    assert end_tokens(model) == [2, 11, 12, 13, 14]
    assert end_tokens(model, tokenizer) == [0, 2, 11, 12, 13, 14]
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == []
