"""The explanation of an acceptance: why each step ended, sums that are those of the replay, and what to type."""

import pytest
import torch

from helpers.models import VOCAB, tiny_drafter, tiny_model
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.proposer import UNDRAFTED
from redrafter.engine.engine import Engine
from redrafter.measure.decode import Texts, write_texts
from redrafter.measure.misses import (
    ALL_ACCEPTED,
    CONTEXTS,
    MISSES,
    NEAR_MISS,
    NODE_BUDGET,
    OUTSIDE_HEAD,
    PROBABILITIES,
    TEXT_ENDED,
    WRONG_GUESS,
    advise,
    base_probabilities,
    explain,
    format_misses,
    mean_margin,
    trace_steps,
)
from redrafter.measure.replay import ReplayStats, replay
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape

# Steps of constructed drafters


def fond_drafter(monkeypatch, head: int | None = None) -> RecurrentDrafter:
    """Make a drafter that likes small ids best, whose search of 2x2 finds the drafts 0, 1, then 0 0 and 1 0.

    Args:
        monkeypatch: Pytest's fixture.
        head: Tokens that it knows, the smallest ids; None for all.
    """
    drafter = tiny_drafter(draft_vocab_size=head)
    falling = -torch.arange(head or VOCAB, dtype=torch.float)

    def step(embedding, state, hidden, read, embedded):
        logits = falling if state is None else 2 * falling
        return logits.expand(*embedding.shape[:-1], -1), embedding

    monkeypatch.setattr(drafter, "step", step)
    return drafter


@pytest.mark.parametrize(
    "continuation, nodes, head, outcome, accepted",
    [
        ([5, 50], 5, 8, OUTSIDE_HEAD, 0),
        ([5, 0, 8], 5, 8, OUTSIDE_HEAD, 1),
        ([5, 0, 7], 5, 8, WRONG_GUESS, 1),
        ([5, 3], 5, None, NEAR_MISS, 0),
        ([5, 4], 5, None, WRONG_GUESS, 0),
        ([5, 0, 1], 5, None, NEAR_MISS, 1),
        ([5, 1], 5, None, TEXT_ENDED, 1),
        ([5, 1], 2, None, NODE_BUDGET, 0),
        ([5, 1, 0], 5, None, ALL_ACCEPTED, 2),
        ([5, 0, 0], 5, None, ALL_ACCEPTED, 2),
        ([5, 0, 0], 2, None, NODE_BUDGET, 1),
    ],
)
def test_each_class_of_misses_comes_from_its_cause(monkeypatch, continuation, nodes, head, outcome, accepted):
    """One step, from a prompt of one token."""
    target, shape = Target(tiny_model("llama")), TreeShape(2, 2, nodes)
    texts = Texts([[9, *continuation]], [1], [False])
    found = explain(fond_drafter(monkeypatch, head), target, texts, shape, {"all": 1})
    tried = min(accepted + 1, 2, len(continuation) - 1)
    assert found["steps"] == 1
    assert (found["all_accepted"], found["text_ended"]) == (
        int(outcome == ALL_ACCEPTED),
        int(outcome == TEXT_ENDED),
    )
    for depth in (0, 1):
        group = found["groups"][f"draft {depth + 1}"]
        assert (group["tried"], group["accepted"]) == (int(depth < tried), int(depth < accepted))
        missed = {name for name in MISSES if group[name]}
        assert missed == ({outcome} if outcome in MISSES and depth == accepted else set())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [TreeShape(3, 4, 13), TreeShape(3, 4, 6), TreeShape(1, 3, 4)])
@pytest.mark.parametrize("head", [None, 40])
def test_traced_steps_are_those_of_the_replay(head, shape, temperature):
    target, drafter = Target(tiny_model("llama")), tiny_drafter(draft_vocab_size=head)
    texts = write_texts(
        Engine(target, UNDRAFTED), [[5], [6, 7, 8], [9, 10]], 30, temperature, seed=3, end_ids=[2, 11, 12]
    )
    steps = trace_steps(drafter, target, texts, shape)
    for index, stats in enumerate(replay(drafter, target, texts, [shape])[0]):
        own = [step.accepted for step in steps if step.text == index]
        assert len(own) == stats.steps
        assert [sum(each > depth for each in own) for depth in range(shape.depth)] == stats.accepted_by_depth
    outcomes = {step.outcome(shape.beams, shape.depth) for step in steps}
    assert (OUTSIDE_HEAD in outcomes) == (head is not None)
    assert shape.nodes < shape.lattice or NODE_BUDGET not in outcomes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", [{}, {"context_window": 9, "context_head_dim": 8}], ids=["published", "context"])
def test_a_rank_is_that_of_the_search(form, temperature):
    """The search of one beam drafts the token of rank 0 at every depth, and no other."""
    target, drafter = Target(tiny_model("llama")), tiny_drafter(**form)
    torch.manual_seed(0)
    for weight in drafter.parameters():  # so large that the recurrence matters, so small that guesses are often right
        torch.nn.init.normal_(weight, std=0.15)
    if drafter.context is not None:
        torch.nn.init.normal_(drafter.context.out.weight, std=0.5)  # or nothing that is read would show
    texts = write_texts(Engine(target, UNDRAFTED), [[token] for token in range(5, 25)], 60, temperature, seed=3)
    steps = trace_steps(drafter, target, texts, TreeShape(1, 3, 3))
    missed = [step for step in steps if step.accepted < min(step.left, 3)]
    assert all((step.rank == 0) == (step.searched > step.accepted) for step in missed)
    if temperature:
        assert any(step.rank == 0 and step.accepted == 2 for step in missed)
        assert any(step.rank > 0 and step.accepted > 0 for step in missed)


def test_texts_that_ended_at_once_have_no_steps():
    target, texts = Target(tiny_model("llama")), Texts([[5, 6], [7, 8, 9]], [1, 2], [True, True])
    found = explain(tiny_drafter(), target, texts, TreeShape(2, 2, 5), {"all": 2})
    assert (found["steps"], found["tokens_per_step"]) == (0, None)
    assert not any(group["tried"] for group in found["groups"].values())
    assert len([*format_misses(found, "a tree")]) == 3
    assert len([*advise([found], TreeShape(2, 2, 5), 9, 9, 2)]) == 2


@pytest.mark.parametrize("temperature, divisor", [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_base_s_probabilities_are_those_of_its_logits(temperature, divisor):
    model = tiny_model("llama")
    texts = Texts([[5, 6, 7, 8], [9, 10]], [1, 1], [False, False], temperature)
    for ids, found in zip(texts.tokens, base_probabilities(Target(model), texts), strict=True):
        logits = model(torch.tensor([ids])).logits[0, :-1] / divisor
        expected = logits.softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, torch.cat([torch.ones(1), expected]), atol=1e-5, rtol=1e-4)


def test_a_context_counts_the_tokens_before_a_draft():
    """Drafts of a head that lacks the text's tokens, after 256 tokens and more."""
    model = tiny_model("llama", max_position_embeddings=600)
    texts = Texts([[5] * 255 + [60] * 5], [255], [False])
    found = explain(tiny_drafter(draft_vocab_size=8), Target(model), texts, TreeShape(2, 2, 5), {"all": 1})
    counts = [found["groups"][name]["tried"] for name in CONTEXTS]
    assert counts == [1, 3, 0, 0, 0, 0]
    assert found["groups"]["all drafts"]["outside head"] == found["steps"] == 4


def test_groups_add_up_to_the_steps_of_the_replay():
    target, drafter, shape = Target(tiny_model("llama")), tiny_drafter(draft_vocab_size=40), TreeShape(3, 3, 8)
    texts = write_texts(
        Engine(target, UNDRAFTED), [[token, 7] for token in range(5, 13)], 30, 1.0, seed=3, end_ids=[2, 11, 12]
    )
    found = explain(drafter, target, texts, shape, {"a": 5, "b": 3})
    stats = ReplayStats.sum(shape, replay(drafter, target, texts, [shape])[0])
    groups = found["groups"]
    assert found["tokens_per_step"] == pytest.approx(stats.tokens_per_step)
    assert [groups[f"draft {depth}"]["tried"] for depth in (1, 2, 3)] == stats.tried
    assert [groups[f"draft {depth}"]["accepted"] for depth in (1, 2, 3)] == stats.accepted_by_depth
    for names in (PROBABILITIES, CONTEXTS, ("a", "b"), ("draft 1", "draft 2", "draft 3")):
        for count in ("tried", "accepted", *MISSES):
            assert sum(groups[name][count] for name in names) == groups["all drafts"][count], (names, count)
    missed = sum(groups["all drafts"][name] for name in MISSES)
    assert missed + found["all_accepted"] + found["text_ended"] == found["steps"]


# Advice


def group(tried: int, accepted: int, **missed: int) -> dict[str, int]:
    """Return the counts of a group; drafts that missed in no class named are wrong guesses."""
    named = {name.replace("_", " "): count for name, count in missed.items()}
    counts = dict.fromkeys(MISSES, 0) | {"wrong guess": tried - accepted - sum(named.values())} | named
    return {"tried": tried, "accepted": accepted} | counts


def found(temperature: float, groups: dict | None = None, **changes: object) -> dict:
    """Return an explanation that finds no cause, with some groups and values replaced."""
    even = {name: group(200, 100) for name in ("all drafts", *PROBABILITIES, *[*CONTEXTS][:2])}
    same = {"steps": 100, "all_accepted": 0, "text_ended": 0, "tokens_per_step": 2.0, "margin": None}
    return {"temperature": temperature, "groups": even | (groups or {})} | same | changes


def advice(groups: dict | None = None, prompts: int = 30, **changes: object) -> list[str]:
    return [*advise([found(0.0), found(0.8, groups, **changes)], TreeShape(2, 1, 2), 40, 97, prompts)]


UNSURE = next(iter(PROBABILITIES))
FEW = {UNSURE: group(100, 20), "all drafts": group(200, 100)}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"groups": {"all drafts": group(200, 100, outside_head=80, near_miss=20)}},
         "80% of the misses at temperature 0.8 are tokens that the drafter's head lacks: it has 40 of 97: redrafter "
         "train --draft-vocab-size 80 "),
        ({"groups": {"all drafts": group(200, 100, near_miss=100)}},
         "redrafter evaluate --shapes 4x1, and if that pays --num-beams 4"),
        ({}, "redrafter regenerate --data prompts.jsonl"),
        ({"groups": {"all drafts": group(200, 100, node_budget=100)}}, "for 2 of 3 nodes are: --node-budget 3"),
        ({"all_accepted": 40},
         "40% of the steps accepted all 1 drafts: redrafter evaluate --shapes 2x4, and if that pays "
         "--draft-len-per-beam 4"),
        ({"tokens_per_step": 1.7},
         "greedy 2.00 tokens per step, at 0.8 1.70; sampled tokens are harder to guess: --temperature 0.4"),
        ({}, "temperature: greedy 2.00 tokens per step, at 0.8 2.00; it is not the cause"),
        ({"groups": FEW},
         "certainty: the base gave its own token less than 0.5 at 50% of the drafts, where 80% of the misses are; no "
         "drafter guesses such tokens well, a lower --temperature "),
        ({"groups": {"up to 512": group(100, 30)}},
         "context: acceptance is 0.500 after up to 256 tokens, 0.300 up to 512; redrafter train --length"),
        ({}, "context: acceptance is 0.500 after up to 256 tokens, 0.500 up to 512; it is not the cause"),
        ({"groups": {"up to 512": group(9, 0)}}, "about the same number of tokens; to compare: redrafter evaluate"),
    ],
)  # fmt: skip
def test_each_cause_has_a_line_that_says_what_to_type(changes, said):
    lines = advice(**changes)
    assert any(said in line for line in lines), lines


def test_greedy_texts_alone_say_how_to_compare():
    lines = [*advise([found(0.0)], TreeShape(2, 1, 2), 40, 97, 30)]
    assert any("redrafter evaluate --temperatures 0,1" in line for line in lines)


def test_few_prompts_give_no_conclusion():
    few = advice(prompts=29, tokens_per_step=1.0)
    assert sum("29 prompts are too few to conclude, give 30 or more" in line for line in few) == 3
    assert not any(verdict in line for line in few for verdict in ("harder to guess", "not the cause"))


def test_a_margin_is_of_texts_and_not_of_their_steps():
    assert mean_margin([2, 2], [1, 1]) == 0
    assert mean_margin([1, 3], [1, 1]) == pytest.approx(1.96)  # the standard error is 1
    assert mean_margin([100, 300], [100, 100]) == pytest.approx(1.96)
    assert mean_margin([3], [1]) is None


def test_what_is_rare_gets_no_line():
    lines = advice({"all drafts": group(200, 100, node_budget=9)})
    assert not any("--node-budget" in line or "accepted all" in line for line in lines)


def test_the_table_has_a_column_for_each_class():
    lines = [
        line.split() for line in format_misses(found(0.8, {"chat": group(50, 3, outside_head=11, near_miss=12)}), "x")
    ]
    assert ["chat", "50", "0.060", "11", "12", "24", "0"] in lines
