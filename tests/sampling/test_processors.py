"""Every processor, at every node of random trees, against Hugging Face's own object on that node's text alone."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from helpers.generation import noted
from helpers.hf_processors import (
    CASES,
    CHANGE_NOTHING,
    EOS,
    PROMPTS,
    STARTS,
    VOCAB,
    WIDTH,
    Make,
    ours,
    random_inputs,
    random_prefixes,
    random_scores,
    read,
    reference,
    text,
)
from helpers.outcomes import on_device
from helpers.processors import EndOfThought, TokenPenalties
from redrafter.sampling.hf_processors import read_processors
from redrafter.sampling.host_processors import PerNode
from redrafter.sampling.processors import (
    THINKING_COLUMNS,
    Constant,
    OfSomeRows,
    RowBias,
    RowMinimum,
    RowMinP,
    RowPenalties,
    RowProcessor,
    RowRepetition,
    RowTemperature,
    RowThinkingBudget,
    RowTopK,
    RowTopP,
    ThinkingBudget,
)
from redrafter.tree.token_tree import chain


@pytest.mark.parametrize("name", CASES)
def test_every_node_gets_what_hugging_face_gives_its_own_text(name: str) -> None:
    make, changed = CASES[name], False
    for seed, lengths in enumerate(STARTS):
        prefixes, scores = random_inputs(seed, lengths)
        expected = reference(make, scores, prefixes)
        for window in (prefixes.window, prefixes.tokens.shape[1]):  # a wider window changes nothing
            got = ours([make(WIDTH)], scores, replace(prefixes, window=window))
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        changed |= not torch.equal(expected, scores)
    assert changed == (name not in CHANGE_NOTHING), "the case does not test what it says"


ENDS = torch.zeros(3, VOCAB, dtype=torch.bool)
ENDS[0, EOS] = ENDS[1, 7] = ENDS[2, EOS] = True
BIAS = torch.zeros(3, VOCAB)
BIAS[0, 3], BIAS[2, 5], BIAS[2, 9] = 2.5, -100.0, 1.0
# Settings of each row; of each row the object that does the same, None where it is off.
ROW_CASES: dict[str, tuple[RowProcessor, list[Make | None]]] = {
    "temperature": (
        RowTemperature(torch.tensor([0.7, 1.0, 2.0])),
        [lambda w: hf.TemperatureLogitsWarper(0.7), None, lambda w: hf.TemperatureLogitsWarper(2.0)],
    ),
    "bias": (
        RowBias(BIAS),
        [
            lambda w: hf.SequenceBiasLogitsProcessor({(3,): 2.5}),
            None,
            lambda w: hf.SequenceBiasLogitsProcessor({(5,): -100.0, (9,): 1.0}),
        ],
    ),
    "repetition": (
        RowRepetition(torch.tensor([1.0, 1.7, 0.6])),
        [None, lambda w: hf.RepetitionPenaltyLogitsProcessor(1.7), lambda w: hf.RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    "penalties": (
        RowPenalties(torch.tensor([0.5, 0.0, -1.0]), torch.tensor([0.0, 0.0, 1.5])),
        [lambda w: TokenPenalties(0.5, 0.0, w), None, lambda w: TokenPenalties(-1.0, 1.5, w)],
    ),
    "minimum": (
        RowMinimum(torch.tensor([4, 9, 0]), ENDS),
        [
            lambda w: hf.MinNewTokensLengthLogitsProcessor(w, 4, EOS),
            lambda w: hf.MinNewTokensLengthLogitsProcessor(w, 9, [7]),
            None,
        ],
    ),
    "budget of a thought": (
        RowThinkingBudget(
            torch.tensor([ThinkingBudget(2, 7).line(), [0] * THINKING_COLUMNS, ThinkingBudget(4, 9).line()])
        ),
        [lambda w: EndOfThought(2, 7, [], w), None, lambda w: EndOfThought(4, 9, [], w)],
    ),
    "top k": (
        RowTopK(torch.tensor([5, 0, 500])),
        [lambda w: hf.TopKLogitsWarper(5), None, lambda w: hf.TopKLogitsWarper(500)],
    ),
    "top p": (
        RowTopP(torch.tensor([0.8, 1.0, 0.2], dtype=torch.float64)),
        [lambda w: hf.TopPLogitsWarper(0.8), None, lambda w: hf.TopPLogitsWarper(0.2)],
    ),
    "top p of top k": (
        RowTopP(torch.tensor([0.8, 1.0, 0.2], dtype=torch.float64), torch.tensor([5, 3, 0])),
        [
            lambda w: LogitsProcessorList([hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.8)]),
            lambda w: hf.TopKLogitsWarper(3),
            lambda w: hf.TopPLogitsWarper(0.2),
        ],
    ),
    "min p": (
        RowMinP(torch.tensor([0.0, 0.1, 1.0])),
        [None, lambda w: hf.MinPLogitsWarper(0.1), lambda w: hf.MinPLogitsWarper(1.0)],
    ),
}


@pytest.mark.parametrize("seed", range(len(STARTS)))
@pytest.mark.parametrize("name", ROW_CASES)
def test_each_row_gets_what_hugging_face_gives_for_its_own_setting(name: str, seed: int) -> None:
    processor, makes = ROW_CASES[name]
    prefixes, scores = random_inputs(seed, STARTS[seed])
    kept = scores.clone()
    for got in (processor(scores, prefixes), processor.process(scores, prefixes)):  # as on a CPU, as in a captured step
        for row, make in enumerate(makes):
            expected = scores if make is None else reference(make, scores, prefixes)
            torch.testing.assert_close(got[row], expected[row], rtol=0, atol=0)
    assert torch.equal(scores, kept)


def test_the_end_of_a_thought_is_forced_at_the_nodes_whose_own_text_has_had_its_tokens() -> None:
    """Tokens are of a small set, so that marks and ends occur in committed tokens, in drafts and across the two."""
    forced = 0
    for seed, lengths in enumerate(STARTS):
        prefixes, scores = random_inputs(seed, lengths)
        small = replace(
            prefixes, tokens=prefixes.tokens % 3, tree=replace(prefixes.tree, tokens=prefixes.tree.tokens % 3)
        )
        for budget, begin in product(range(6), ((), (1,), (2, 1))):
            line = torch.tensor([ThinkingBudget(budget, 0, begin).line()]).expand(len(scores), -1)
            got = RowThinkingBudget(line).process(scores, small)
            expected = reference(lambda w, b=budget, a=begin: EndOfThought(b, 0, [*a], w), scores, small)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            forced += int((got != scores).any(-1).sum())
    assert forced > 5


def test_the_end_of_a_thought_is_forced_where_a_grammar_first_allows_it() -> None:
    """Within a character no end is allowed: the scores stay, and the end comes at the next draw that allows it."""
    prefixes, scores = random_inputs(0, STARTS[0])
    prefixes = replace(
        prefixes,
        tokens=prefixes.tokens.clamp(min=1),
        tree=replace(prefixes.tree, tokens=prefixes.tree.tokens.clamp(min=1)),
    )
    written = prefixes.counts - prefixes.prompt[:, None]
    within = written % 2 == 0  # of draws that the grammar lets not end the thought
    scores[..., 0] = scores[..., 0].masked_fill(within, -math.inf)
    for budget in range(int(written.max()) + 1):
        line = torch.tensor([ThinkingBudget(budget, 0).line(guided=True)]).expand(len(scores), -1)
        got = RowThinkingBudget(line).process(scores, prefixes)
        forced = (written >= budget) & ~within
        assert torch.equal(got[~forced], scores[~forced])
        assert (got[forced].argmax(-1) == 0).all()
        assert (got[forced].isfinite().sum(-1) == 1).all()


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows_whose_setting_changes_nothing_are_not_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, makes = ROW_CASES[name]
    computed = noted(monkeypatch, type(processor), "process", lambda _, self, scores, texts: len(scores))
    processor(*random_inputs(0)[::-1])
    assert computed == [sum(make is not None for make in makes)]


def test_processors_of_some_rows_leave_the_others_as_they_are() -> None:
    prefixes, [bias, top_p] = random_prefixes(1), [ROW_CASES[name][0] for name in ("bias", "top p")]
    scores = random_scores(1, prefixes)
    got, whole = OfSomeRows(torch.tensor([2, 0, 2]), (bias, top_p))(scores, prefixes), scores
    for processor in (bias, top_p):
        whole = processor.process(whole, prefixes)
    torch.testing.assert_close(got[[0, 2]], whole[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(got[1], scores[1], rtol=0, atol=0)


OF_ROWS = ("temperature", "top k", "top p", "min p", "repetition penalty", "min length", "min new tokens")
OF_ROWS += (
    "repetition penalty without the prompt",
    "bias of single tokens",
    "bad single tokens",
)
CONSTANT = ("top p keeping three", "min p keeping three", "top k filled with a number", "bad words", "eta")


@pytest.mark.parametrize("name", [*OF_ROWS, *CONSTANT])
def test_settings_of_rows_are_read_into_tensors_and_others_are_constants_of_a_function(name: str) -> None:
    [processor], _ = read([CASES[name](WIDTH)])
    assert isinstance(processor, RowProcessor)
    assert isinstance(processor, Constant) == (name in CONSTANT)
    assert [len(setting) for setting in processor.settings] == [len(PROMPTS)] * len(processor.settings)
    assert bool(processor.settings) == (name in OF_ROWS)


def test_a_step_that_was_captured_for_one_call_serves_others_of_the_same_constants() -> None:
    """The length of their prompts is no constant."""

    def kind(name: str, width: int) -> tuple:
        prompt, given = torch.tensor([1, 2, 3]), [CASES[name](width)]
        [processor], _ = read_processors(given, width=width, prompt=prompt, vocabulary=VOCAB)
        return processor.kind

    kinds = {name: kind(name, WIDTH) for name in CASES}
    assert all(kind(name, width) == kinds[name] for name in kinds for width in (WIDTH, 4))
    constants = [kind for kind in kinds.values() if kind[0] is Constant]
    assert len(set(constants)) == len(constants) > 20


def test_processors_of_one_kind_differ_in_settings_alone() -> None:
    def kind(processor: LogitsProcessor) -> tuple:
        return read([processor])[0][0].kind

    assert kind(hf.TopPLogitsWarper(0.9)) == kind(hf.TopPLogitsWarper(0.2)) != kind(hf.MinPLogitsWarper(0.2))
    assert kind(hf.TopKLogitsWarper(9)) == kind(hf.TopKLogitsWarper(30))
    ignoring = hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3)
    assert kind(ignoring) != kind(hf.RepetitionPenaltyLogitsProcessor(1.7))


@pytest.mark.parametrize("name", [*CASES, *ROW_CASES])
def test_no_processor_reads_a_value_on_the_host(name: str) -> None:
    """Tensors on the meta device have shapes and no values: reading one, or a shape that depends on one, raises."""
    prefixes, scores = random_inputs(0)
    tree = on_device(prefixes.tree, "meta")
    fields = {key: getattr(prefixes, key).to("meta") for key in ("tokens", "length", "prompt", "limit")}
    for processor in [ROW_CASES[name][0]] if name in ROW_CASES else read([CASES[name](WIDTH)])[0]:
        assert not isinstance(processor, PerNode)
        if isinstance(processor, RowProcessor):
            processor = processor.map(lambda tensor: tensor.to("meta"))
        assert processor(scores.to("meta"), replace(prefixes, tree=tree, **fields)).shape == scores.shape


@pytest.mark.parametrize("seed", range(len(STARTS)))
@pytest.mark.parametrize("shape", ["lattice", "chain"])
def test_texts_are_the_committed_tokens_and_the_path(shape: str, seed: int) -> None:
    prefixes = random_prefixes(seed, STARTS[seed])
    if shape == "chain":  # as deep as it has nodes: the longest texts that a window can come with
        prefixes = replace(prefixes, tree=chain(prefixes.tree.tokens))
    sequences, last = prefixes.sequences(), prefixes.last(4)
    for row, node in product(*map(range, prefixes.tree.tokens.shape)):
        path_text = text(prefixes, row, node)[0].tolist()
        assert prefixes.counts[row, node] == len(path_text)
        assert sequences[row, node].tolist() == path_text + [-1] * (sequences.shape[-1] - len(path_text))
        assert last[row, node].tolist() == ([-1] * 4 + path_text)[-4:]


def test_padding_that_hugging_face_reports_is_not_looked_at() -> None:
    prefixes, scores = random_inputs(0)
    padding = torch.tensor([WIDTH - prompt for prompt in PROMPTS])
    given = hf.RepetitionPenaltyLogitsProcessor(1.7)
    given.prompt_ignore_length = padding  # as `generate` makes it from transformers 5.23 on
    expected = reference(lambda width: hf.RepetitionPenaltyLogitsProcessor(1.7), scores, prefixes)
    torch.testing.assert_close(ours([given], scores, prefixes), expected)


@pytest.mark.parametrize("name", ["repetition penalty", "no repeated token", "no repeated bigram"])
def test_tokens_past_the_vocabulary_are_passed_over(name: str) -> None:
    """An embedding can be wider than the head; the scores that there are get what they get from a head as wide."""
    prefixes = random_prefixes(0, few=12)
    scores = random_scores(0, prefixes, vocab=12)
    make = CASES[name]
    expected = reference(make, scores, prefixes)[..., :8]
    torch.testing.assert_close(ours([make(WIDTH)], scores[..., :8], prefixes), expected)


def test_scores_that_are_nan_or_infinite_become_finite() -> None:
    prefixes, scores = random_inputs(0)
    scores[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    got = ours([hf.InfNanRemoveLogitsProcessor()], scores, prefixes)
    assert got.isfinite().all()
    assert got[0, 0, 0] == 0


def test_min_length_that_min_new_tokens_implies_is_dropped() -> None:
    """`generate` adds both; counted in padded tokens, the first would hold a short row for longer than asked."""
    minimum = hf.MinNewTokensLengthLogitsProcessor(WIDTH, 4, EOS)
    implied, own = hf.MinLengthLogitsProcessor(WIDTH + 4, EOS), hf.MinLengthLogitsProcessor(WIDTH + 5, EOS)
    assert len(read([implied, minimum], min_new_tokens=4)[0]) == 1
    assert len(read([own, minimum], min_new_tokens=4)[0]) == 2
    assert len(read([implied])[0]) == 1
    assert read([hf.MinLengthLogitsProcessor(WIDTH, EOS)], min_new_tokens=0)[0] == []


@pytest.mark.parametrize("seed", range(len(STARTS)))
def test_many_processors_in_a_row_equal_the_list_of_hugging_face(seed: int) -> None:
    prefixes, scores = random_inputs(seed, STARTS[seed])
    names = ["repetition penalty", "no repeated 4-gram", "bad words", "min new tokens", "length decay"]
    names += ["temperature", "top k", "top p"]

    def make(width: int) -> LogitsProcessorList:
        return LogitsProcessorList(CASES[name](width) for name in names)

    torch.testing.assert_close(ours(make(WIDTH), scores, prefixes), reference(make, scores, prefixes))


def test_the_order_given_is_the_order_applied() -> None:
    prefixes, scores = random_inputs(0)

    penalty, norm = hf.RepetitionPenaltyLogitsProcessor(1.7), hf.LogitNormalization()
    orders = [lambda width: LogitsProcessorList([penalty, norm]), lambda width: LogitsProcessorList([norm, penalty])]
    results = [ours(make(WIDTH), scores, prefixes) for make in orders]
    for got, make in zip(results, orders, strict=True):
        torch.testing.assert_close(got, reference(make, scores, prefixes))
    assert not torch.allclose(*results)
