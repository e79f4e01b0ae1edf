"""Drafts from a row's own text: alone, and beside those of another proposer."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from helpers.generation import ON_BOTH_CACHES, noted
from helpers.models import tiny_drafter, tiny_model
from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter, boxed_pair
from redrafter.drafting import prompt_lookup
from redrafter.drafting.policy import text_nodes
from redrafter.drafting.prompt_lookup import (
    LEAST_MATCH,
    Repeats,
    WithPromptLookup,
    copy_from,
    graft,
    latest_match,
)
from redrafter.drafting.proposer import State, UndraftedProposer
from redrafter.drafting.step_times import StepCosts
from redrafter.engine.options import EngineOptions
from redrafter.engine.step_timing import TOKENS
from redrafter.model.target import Target
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.tree.accept import accept
from redrafter.tree.beam_search import beam_search
from redrafter.tree.sizes import TreeShape


def drafts(text, *, ngram=2, draft_len=4, room=6):
    tokens, length = torch.tensor([text + [99] * room]), torch.tensor([len(text) - 1])
    start, _ = latest_match(tokens, length, ngram)
    return copy_from(tokens, length, start, draft_len)[0].tolist()


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], {}, [3, 4, 5, 6]),
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], {}, [4, 9, 1, 2]),  # the latest occurrence
        ([1, 2, 3, 5, 5, 2, 9, 9, 1, 2], {}, [3, 5, 5, 2]),  # a longer match is better than a later one
        ([1, 2, 3, 5, 5, 2, 9, 9, 1, 2], {"ngram": 1}, [9, 9, 1, 2]),
        ([7, 2, 3, 4, 9, 2], {}, [3, 4, 9, 2]),  # fewer words serve where so many never stood together
        ([5, 1, 2, 1, 2], {}, [1, 2, 1, 2]),  # a loop goes on
        ([5, 5], {}, [5, 5, 5, 5]),
        ([1, 2, 3], {}, [3, 3, 3, 3]),  # nothing found is no error
        ([1], {"ngram": 3}, [1, 1, 1, 1]),
    ],
)
def test_what_followed_the_same_words_is_drafted(text, how, expected):
    assert drafts(text, **how) == expected


def test_text_that_repeats_takes_few_steps():
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    engine = PromptLookup.from_pretrained(model, draft_len=4)
    prompt = torch.tensor([[5, 5, 5, 5]])
    out = engine.generate(prompt, max_new_tokens=41, do_sample=False, eos_token_id=-1, return_dict_in_generate=True)
    assert out.sequences[0, 4:].tolist() == [0] * 41  # every logit is 0: the first id wins, always
    assert out.stats.tokens_per_step == 4  # two steps until it repeats itself, then five tokens a step


@pytest.mark.parametrize(("name", "value"), [("ngram", 0), ("draft_len", 0), ("ngram", 1.5), ("draft_len", True)])
def test_numbers_that_make_no_proposer_are_refused(llama, name, value):
    with pytest.raises(ArgumentError, match=name):
        PromptLookup.from_pretrained(llama, **{name: value})


def slow_match(text: list[int], most: int) -> tuple[int, int]:
    """Look at every earlier position, and return where the best match ends and its length."""
    found = (0, 0)
    for end in range(1, len(text)):
        size = 0
        while size < min(most, end) and text[end - 1 - size] == text[-1 - size]:
            size += 1
        if size and size >= found[1]:
            found = end, size
    return found


@pytest.mark.parametrize("most", [1, 2, 8])
def test_the_longest_match_is_found_in_every_text(most):
    made = random.Random(most)
    texts = [[made.randrange(3) for _ in range(made.randrange(1, 30))] for _ in range(200)]
    tokens = torch.tensor([text + [0] * (40 - len(text)) for text in texts])
    start, size = latest_match(tokens, torch.tensor([len(text) - 1 for text in texts]), most)
    assert list(zip(start[:, 0].tolist(), size[:, 0].tolist(), strict=True)) == [
        slow_match(text, most) for text in texts
    ]


def test_the_host_knows_which_texts_have_a_match():
    made = random.Random(0)
    for _ in range(100):
        text, repeats = [made.randrange(5) for _ in range(30)], Repeats()
        length = made.randrange(1, 5)
        while length <= len(text):
            matches = slow_match(text[:length], LEAST_MATCH)[1] == LEAST_MATCH
            assert repeats.has_match(text[:length]) == matches
            length += made.randrange(1, 5)


def paths(tree, row: int) -> set[tuple[int, ...]]:
    """Return the tokens on the way to each node."""
    ways = []
    for node in range(tree.tokens.shape[1]):
        parent = int(tree.parents[row, node])
        assert node == 0 or parent < node
        ways.append((ways[parent] if node else ()) + (int(tree.tokens[row, node]),))
        assert len(ways[-1]) == tree.depth[row, node] + 1
        assert sorted(tree.ancestors[row, node].nonzero()[:, 0].tolist())[-1] == node
        assert tree.ancestors[row, node].sum() == len(ways[-1])
    assert len(set(ways)) == len(ways), "siblings have different tokens"
    return set(ways)


def test_a_grafted_tree_has_the_paths_of_both_and_keeps_the_longer():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 64, 5, 5, generator=generator)  # of 5 tokens after each, in 64 rows

    def expand(k, tokens, sources):
        return scores[k][torch.arange(64)[:, None], tokens]

    root = torch.zeros(64, dtype=torch.long)
    for beams, nodes in ((1, 9), (3, 10), (3, 6)):
        tree = beam_search(root, expand, beams=beams, depth=3, nodes=nodes)
        drafts = torch.randint(5, (64, tree.levels + 4), generator=generator)
        both = graft(tree, drafts)
        drawn = torch.randint(5, both.tokens.shape, generator=generator)
        drawn[::2] = drafts[::2].gather(1, both.depth[::2].clamp(max=drafts.shape[1] - 1))  # what was copied is right
        kept = accept(both, drawn, both.levels).accepted
        alone = accept(tree, drawn[:, : tree.tokens.shape[1]], tree.levels).accepted
        assert (kept >= alone).all()
        for row in range(64):
            own, whole = paths(tree, row), paths(both, row)
            agreed = max(len(way) for way in own if way == (0, *drafts[row].tolist())[: len(way)])
            assert whole == own | {(0, *drafts[row].tolist())[:size] for size in range(agreed + 1, agreed + 5)}
            if row % 2 == 0:
                assert kept[row] >= agreed - 1 + 4


@ON_BOTH_CACHES
@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 5}], ids=["greedy", "sampled"]
)
def test_a_text_that_repeats_takes_fewer_steps_than_its_drafter(on, how):
    model = tiny_model("llama")
    engines = [
        on(ReDrafter(Target(model), tiny_drafter(), TreeShape(3, 3), options=EngineOptions(draft_from_text=copies)))
        for copies in (True, False)
    ]
    prompt = torch.tensor([list(range(3, 20)) * 3])
    settings = {"max_new_tokens": 44, "eos_token_id": -1, "return_dict_in_generate": True} | how
    both, alone = (engine.generate(prompt, **settings) for engine in engines)
    assert torch.equal(both.sequences, alone.sequences)
    assert torch.equal(both.sequences, engines[0].generate(prompt, speculate=False, **settings).sequences)
    assert alone.stats.copied == 0
    assert both.stats.copied <= both.stats.accepted
    if not how["do_sample"]:  # which ends in a loop
        assert both.stats.copied > 20
        assert both.stats.steps < 0.7 * alone.stats.steps


@ON_BOTH_CACHES
@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 2}], ids=["greedy", "sampled"]
)
def test_on_a_cpu_a_step_without_a_match_is_that_of_the_drafter_alone(on, how, monkeypatch):
    target = Target(tiny_model("llama", max_position_embeddings=512))
    engines = [
        on(ReDrafter(target, tiny_drafter(), options=EngineOptions(draft_from_text=copies))) for copies in (True, False)
    ]
    searched = noted(monkeypatch, prompt_lookup, "latest_match", lambda found, *_: int(found[1].max()))
    windows = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, *_: step.state.tokens.shape[1])
    settings = {"max_new_tokens": 60, "eos_token_id": -1, "return_dict_in_generate": True} | how
    # No two tokens of it stand together twice.
    prompt = torch.tensor([[*range(3, 97), *range(3, 97, 2), *range(3, 97, 3)]])
    out = engines[0].generate(prompt, **settings)
    assert 0 < len(searched) < out.stats.steps
    assert min(searched) >= LEAST_MATCH
    assert how["do_sample"] or out.stats.copied
    assert windows[0] == 256, "positions that only copies would reach are not attended to"
    assert torch.equal(out.sequences, engines[1].generate(prompt, **settings).sequences)
    assert torch.equal(out.sequences, engines[0].generate(prompt, speculate=False, **settings).sequences)


def test_on_a_cpu_a_match_of_the_fewest_tokens_adds_copied_drafts():
    for matched, grafted in ((LEAST_MATCH - 1, 0), (LEAST_MATCH, 2 * LEAST_MATCH)):
        end = [1, 2, 3][-matched:]
        text = torch.tensor([[*end, 4, 5, 6, 7, 8, 9, *end]])
        state = State(text, torch.tensor([text.shape[1] - 1]), torch.zeros(1, 4), torch.ones(1, dtype=torch.bool))
        tree = WithPromptLookup(UndraftedProposer(), draft_len=6).propose(state, None, None, None, None)
        assert tree.grafted == grafted
        assert max(paths(tree, 0), key=len) == (3, 4, 5, 6, 7, 8)[: 1 + grafted]


def test_rows_that_would_pay_for_copies_have_none():
    # Of an 8B model on one H100, in ms: with FP8 weights 128 tokens take half as long again as one.
    usual, float8 = (
        StepCosts(((1, one), (64, few), (128, more), (256, many)), ((5, 0.2),))
        for one, few, more, many in ((6.35, 6.79, 7.43, 8.84), (4.33, 4.88, 6.62, 7.08))
    )
    assert text_nodes(1, 26, "cuda", usual) == text_nodes(4, 13, "cuda", usual) == 16
    assert text_nodes(4, 26, "cuda", usual) == 6
    assert text_nodes(8, 16, "cuda", usual) == text_nodes(4, 16, "cpu", usual) == 0
    assert text_nodes(8, 8, "cuda", usual) == 8
    assert text_nodes(8, 8, "cuda", float8) == 0
    assert text_nodes(1, 26, "cuda", float8) == 16
    assert text_nodes(4, 8, "cpu", float8) == 8


def test_with_weights_in_groups_a_row_copies_as_many_drafts_as_take_no_further_tile():
    # Of an 8B model in 4 bits on one H200, in ms, by the tokens of a tile.
    tiles = {8: 2.56, 16: 2.8, 32: 3.92, 64: 5.45, 128: 9.9}
    times = ((tokens, next((ms for size, ms in tiles.items() if tokens <= size), 12.0)) for tokens in TOKENS)
    assert text_nodes(1, 8, "cuda", StepCosts(tuple(times), ((8, 0.12),))) == 8


@ON_BOTH_CACHES
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_draft_models_tree_and_copies_write_what_is_written_without(on, how, beams):
    model = tiny_model("llama")
    engine = on(DraftTarget(Target(model), Target(model), draft_len=3, num_beams=beams, node_budget=7))
    settings = {"max_new_tokens": 60, "eos_token_id": -1, "return_dict_in_generate": True, "top_k": 2} | how
    for prompt in ([5, 6, 7], list(range(3, 20)) * 3):
        out = engine.generate(torch.tensor([prompt]), **settings)
        assert torch.equal(
            out.sequences, engine.generate(torch.tensor([prompt]), speculate=False, **settings).sequences
        )
    assert how["do_sample"] or out.stats.copied > 20


def test_a_draft_model_reads_what_was_copied_before_it_drafts_again():
    """One that equals the target is always right, unless it has not read what it follows."""
    engine = DraftTarget.from_pretrained(boxed_pair(), boxed_pair(), draft_len=3)
    held_out = Path(__file__).parents[1] / "data" / "held_out.jsonl"
    prompt = json.loads(held_out.read_text(encoding="utf-8").splitlines()[2])["prompt"]
    ids = AutoTokenizer.from_pretrained(boxed_pair())(prompt, return_tensors="pt").input_ids
    stats = engine.generate(
        ids, max_new_tokens=64, do_sample=False, eos_token_id=-1, return_dict_in_generate=True
    ).stats
    assert stats.copied > 15
    assert stats.accepted_by_depth[2] >= stats.steps - 1, "the limit may cut the last step"
