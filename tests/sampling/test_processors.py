"""Every processor, at every node of random trees, against Hugging Face's own object on that node's text alone."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from helpers.generation import noted
from helpers.processors import TokenPenalties
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.sampling.hf_processors import READERS, REFUSED, TemperaturePerRow, index_of_warpers, read_processors
from redrafter.sampling.host_processors import PerNode
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.processors import (
    Constant,
    OfSomeRows,
    RowBias,
    RowMinimum,
    RowMinP,
    RowPenalties,
    RowProcessor,
    RowRepetition,
    RowTemperature,
    RowTopK,
    RowTopP,
)
from redrafter.tree.token_tree import chain, tree_of

VOCAB, WIDTH = 40, 15
PROMPTS = [1, 7, 15]  # each row's own prompt; the longest has no padding
LENGTHS = [0, 9, 30]  # committed tokens: row 0 is about to draw its first
EOS = [2, 5]
IN_NO_SEQUENCE = 39  # of bad words and biases below

Make = Callable[[int], LogitsProcessor]  # from a prompt length to the object: with WIDTH ours, with the row's own HF's


def random_prefixes(seed: int, lengths: list[int] = LENGTHS, beams: int = 4, steps: int = 3, few: int = 6) -> Prefixes:
    """Unequal rows over `few` token ids, so that texts repeat themselves, and lattices with random parents."""
    random = torch.Generator().manual_seed(seed)
    rows, nodes = len(lengths), 1 + beams * steps
    depth = torch.cat([torch.zeros(1), torch.arange(1, steps + 1).repeat_interleave(beams)]).long()
    first = (1 + (depth - 2).clamp(min=0) * beams) * (depth > 1)  # where the layer above begins
    parents = first + torch.randint(beams, (rows, nodes), generator=random) * (depth > 1)
    tree = tree_of(torch.randint(few, (rows, nodes), generator=random), parents, depth.expand(rows, nodes), steps)
    size = max(lengths) + 9
    tokens = torch.randint(few, (rows, size), generator=random)
    length = torch.tensor(lengths)
    place = torch.arange(size)
    tokens = tokens.where(place < length[:, None], torch.tensor([1, 3, 10**6, -7])[place % 4])  # garbage after
    tokens.scatter_(1, length[:, None], tree.tokens[:, :1])
    prompt = torch.tensor(PROMPTS[:rows])
    return Prefixes(tokens, length, prompt, prompt + 40 - WIDTH, tree, window=max(lengths) + 1)


def random_inputs(seed: int, lengths: list[int] = LENGTHS) -> tuple[Prefixes, Tensor]:
    prefixes = random_prefixes(seed, lengths)
    return prefixes, random_scores(seed, prefixes)


def random_scores(seed: int, prefixes: Prefixes, vocab: int = VOCAB) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(*prefixes.tree.tokens.shape, vocab, generator=random)
    return scores.masked_fill(torch.rand(scores.shape, generator=random) < 0.05, -math.inf)


def text(prefixes: Prefixes, row: int, node: int) -> Tensor:
    """`[1, L]`: the row's committed tokens, then the way down to the node, read in plain Python."""
    path = [node]
    while path[0]:
        path.insert(0, int(prefixes.tree.parents[row, path[0]]))
    committed = prefixes.tokens[row, : int(prefixes.length[row])].tolist()
    return torch.tensor([committed + [int(prefixes.tree.tokens[row, step]) for step in path]])


def reference(make: Make, scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Call the object made for each row alone at every node alone."""
    expected = scores.clone()
    for row, prompt in enumerate(prefixes.prompt.tolist()):
        processor = make(prompt)
        for node in range(scores.shape[1]):
            expected[row, node] = called(processor, text(prefixes, row, node), scores[row, node, None].clone())[0]
    return expected


def called(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    """Call an object, or a list of them, so that every release of transformers answers as the newest does."""
    if isinstance(processor, LogitsProcessorList):
        for single in processor:
            scores = called(single, ids, scores)
        return scores
    if isinstance(processor, hf.SequenceBiasLogitsProcessor):
        # Before 5.18 it passes over a sequence that is the whole text and one token more: let it not be the whole text.
        return processor(pad(ids, (1, 0), value=IN_NO_SEQUENCE), scores)
    processed = processor(ids, scores)
    if isinstance(processor, hf.ExponentialDecayLengthPenalty):
        return processed.where(scores.isfinite(), scores)  # before 5.19 it makes -inf nan
    return processed


def read(given: list, prompt: Tensor | None = None, vocabulary: int = VOCAB) -> tuple[list, list[str]]:
    prompt = torch.tensor(PROMPTS) if prompt is None else prompt
    return read_processors(given, width=WIDTH, prompt=prompt, vocabulary=vocabulary)


def ours(given: list, scores: Tensor, prefixes: Prefixes) -> Tensor:
    before = scores.clone()
    for processor in read(given, prefixes.prompt, scores.shape[-1])[0]:
        scores_in, kept = scores, scores.clone()
        scores = processor(scores_in, prefixes)
        torch.testing.assert_close(scores_in, kept, rtol=0, atol=0, equal_nan=True)  # never in place
        assert scores.dtype == torch.float32
        assert scores.shape == before.shape
    return scores


def alone(width: int) -> int:
    """Return what `max_length=40` of the padded call means to a row whose prompt is `width` long."""
    return 40 - WIDTH + width


BAD_WORDS = [[7], [1, 2], [1, 3], [0, 4, 1], [3, 3, 3], [5], [2, 5], [0, 0, 0, 0, 0]]
# Without token 0, which no bias may name before transformers 5.18; bad words, which we read alike, have it.
BIASES = [[[3, 2], 1e8], [[1, 2], -2.0], [[1, 3, 2], -1e8], [[4, 2, 2, 2], 3.0], [[7], 1.5], [[2], 0.7]]
CASES: dict[str, Make] = {
    "temperature": lambda width: hf.TemperatureLogitsWarper(0.7),
    "top k": lambda width: hf.TopKLogitsWarper(5),
    "top k above the vocabulary": lambda width: hf.TopKLogitsWarper(500),
    "top p": lambda width: hf.TopPLogitsWarper(0.8),
    "top p at 0.9": lambda width: hf.TopPLogitsWarper(0.9),
    "top p at 1": lambda width: hf.TopPLogitsWarper(1.0),
    "top k filled with a number": lambda width: hf.TopKLogitsWarper(5, filter_value=-9.0),
    "top p keeping three": lambda width: hf.TopPLogitsWarper(0.1, min_tokens_to_keep=3),
    "min p": lambda width: hf.MinPLogitsWarper(0.1),
    "min p keeping three": lambda width: hf.MinPLogitsWarper(0.9, min_tokens_to_keep=3),
    "typical": lambda width: hf.TypicalLogitsWarper(0.6),
    "epsilon": lambda width: hf.EpsilonLogitsWarper(0.02),
    "eta": lambda width: hf.EtaLogitsWarper(0.1),
    "eta keeping three": lambda width: hf.EtaLogitsWarper(0.9, min_tokens_to_keep=3),
    "top h": lambda width: hf.TopHLogitsWarper(0.4),
    "top h below the first term": lambda width: hf.TopHLogitsWarper(0.01),
    "suppress": lambda width: hf.SuppressTokensLogitsProcessor([1, 4, 39, 41]),
    "infinities and nans": lambda width: hf.InfNanRemoveLogitsProcessor(),
    "log softmax": lambda width: hf.LogitNormalization(),
    "repetition penalty": lambda width: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition reward": lambda width: hf.RepetitionPenaltyLogitsProcessor(0.6),
    "repetition penalty without the prompt": lambda width: hf.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=width
    ),
    "repetition penalty after a part of the prompt": lambda width: hf.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=max(width - 2, 0)
    ),
    "no repeated token": lambda width: hf.NoRepeatNGramLogitsProcessor(1),
    "no repeated bigram": lambda width: hf.NoRepeatNGramLogitsProcessor(2),
    "no repeated trigram": lambda width: hf.NoRepeatNGramLogitsProcessor(3),
    "no repeated 4-gram": lambda width: hf.NoRepeatNGramLogitsProcessor(4),
    "no repeated n-gram longer than any text": lambda width: hf.NoRepeatNGramLogitsProcessor(60),
    "bad words": lambda width: hf.NoBadWordsLogitsProcessor(BAD_WORDS, EOS),
    "bad words and no eos": lambda width: hf.NoBadWordsLogitsProcessor(BAD_WORDS),
    "bad words that are all eos": lambda width: hf.NoBadWordsLogitsProcessor([[5], [2]], EOS),
    "bad single tokens": lambda width: hf.NoBadWordsLogitsProcessor([[7], [1]], EOS),
    "bias of single tokens": lambda width: hf.SequenceBiasLogitsProcessor({(3,): 2.0, (1,): -1e8}),
    "sequence bias": lambda width: hf.SequenceBiasLogitsProcessor(BIASES),
    "sequence bias as a dict": lambda width: hf.SequenceBiasLogitsProcessor({(3,): 2.0, (1, 3): -1.0}),
    "min length": lambda width: hf.MinLengthLogitsProcessor(11, EOS),
    "min new tokens": lambda width: hf.MinNewTokensLengthLogitsProcessor(width, 4, EOS),
    "forced bos": lambda width: hf.ForcedBOSTokenLogitsProcessor(3),
    "forced eos": lambda width: hf.ForcedEOSTokenLogitsProcessor(alone(width), EOS),
    "length decay": lambda width: hf.ExponentialDecayLengthPenalty((2, 1.3), EOS, width),
    "length decay from the start": lambda width: hf.ExponentialDecayLengthPenalty((0, 1.05), 2, width),
    "suppress at begin": lambda width: hf.SuppressTokensAtBeginLogitsProcessor([3, 4], width),
    "suppress one after begin": lambda width: hf.SuppressTokensAtBeginLogitsProcessor([3, 4], width + 1),
}
CASES["temperature per row"] = lambda width: TemperaturePerRow([0.7] * (3 if width == WIDTH else 1))
CHANGE_NOTHING = {  # on our random trees
    "top k above the vocabulary",
    "top p at 1",
    "no repeated n-gram longer than any text",
    "bad words that are all eos",
}
STARTS = [LENGTHS, [0, 6, 14], [1, 7, 15], [2, 30, 17], [23, 8, 36]]


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
    "temperature per row",
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
    tree = prefixes.tree.to(torch.device("meta"))
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
    assert len(read([implied, minimum])[0]) == 1
    assert len(read([own, minimum])[0]) == 2
    assert len(read([implied])[0]) == 1


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


@pytest.mark.parametrize("seed", range(len(STARTS)))
def test_what_generate_prepares_is_taken_as_it_comes(seed: int) -> None:
    """The list of a real call on a padded batch: no row is asked for more than it would be alone."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    wishes = {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    wishes |= {"bad_words_ids": BAD_WORDS, "sequence_bias": BIASES, "forced_eos_token_id": EOS, "eos_token_id": EOS}
    wishes |= {"exponential_decay_length_penalty": (2, 1.3), "suppress_tokens": [9], "begin_suppress_tokens": [3]}
    wishes |= {"temperature": 0.8, "top_h": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    wishes |= {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "renormalize_logits": True, "pad_token_id": 0}

    def make(width: int, padding: Tensor | None = None) -> LogitsProcessorList:
        config = GenerationConfig(**wishes, max_length=alone(width), min_length=width + 4)
        model._prepare_special_tokens(config, device="cpu")
        mask = None if padding is None else (torch.arange(width) >= padding[:, None]).long()
        return model._get_logits_processor(
            config, input_ids_seq_length=width, device="cpu", model_kwargs={"attention_mask": mask}
        )

    padding = torch.tensor([WIDTH - prompt for prompt in PROMPTS])
    prefixes = random_prefixes(seed, STARTS[seed])
    scores = random_scores(seed, prefixes).nan_to_num(neginf=-9.0)
    processed = ours(make(WIDTH, padding), scores, prefixes)
    torch.testing.assert_close(processed, reference(make, scores, prefixes), rtol=1e-5, atol=1e-5)


class ForbidsTheLastToken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        scores[:, input_ids[0, -1]] = -math.inf  # in place, as users do
        return scores * input_ids.shape[1]


class MyRepetitionPenalty(hf.RepetitionPenaltyLogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids, scores) + 1


def halve(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores / 2


PENALTY, TOP_K, TOP_P = hf.RepetitionPenaltyLogitsProcessor(1.7), hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.5)
MIN_P, NORM = hf.MinPLogitsWarper(0.1), hf.LogitNormalization()


@pytest.mark.parametrize(
    ("processors", "index"),
    [
        ([], 0),
        ([PENALTY], 1),
        ([PENALTY, TOP_K, TOP_P, MIN_P, NORM], 1),
        ([TOP_P, TOP_K, MIN_P], 1),  # the first is the user's own
        ([halve, TOP_P], 1),
    ],
)
def test_a_temperature_goes_where_transformers_puts_its_own(processors: list, index: int) -> None:
    assert index_of_warpers(processors) == index


@pytest.mark.parametrize("own", [ForbidsTheLastToken(), MyRepetitionPenalty(1.7), halve])
def test_a_users_own_processor_runs_node_by_node_and_is_named(own: Callable[[Tensor, Tensor], Tensor]) -> None:
    prefixes, scores = random_inputs(0)
    built, slow = read([own, TOP_K])
    assert slow == [getattr(own, "__name__", type(own).__name__)]
    assert isinstance(built[0], PerNode)
    assert not isinstance(built[1], PerNode)
    torch.testing.assert_close(ours([own], scores, prefixes), reference(lambda width: own, scores, prefixes))


def test_a_class_that_only_shares_a_name_is_a_users_own() -> None:
    impostor = type("TopKLogitsWarper", (LogitsProcessor,), {"__call__": lambda self, ids, scores: scores + 1})()
    prefixes, scores = random_inputs(0)
    assert read([impostor])[1] == ["TopKLogitsWarper"]
    torch.testing.assert_close(ours([impostor], scores, prefixes), scores + 1)


def test_a_prefix_function_is_told_its_row() -> None:
    def allowed(row: int, tokens: Tensor) -> list[int]:
        return [(row + int(tokens[-1])) % 6, 10 + len(tokens) % 5, 20 + row]

    prefixes, scores = random_inputs(0)
    given = hf.PrefixConstrainedLogitsProcessor(allowed, 1)
    assert read([given])[1] == ["PrefixConstrainedLogitsProcessor"]
    row_of = {prompt: row for row, prompt in enumerate(PROMPTS)}
    expected = reference(
        lambda width: hf.PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(row_of[width], tokens), 1),
        scores,
        prefixes,
    )
    torch.testing.assert_close(ours([given], scores, prefixes), expected, rtol=0, atol=0)


def test_a_draft_that_a_grammar_forbids_is_no_error() -> None:
    """Only even tokens may follow; what follows an odd one, the grammar cannot say. No draw can ever lead there."""

    def allowed(row: int, tokens: Tensor) -> list[int]:
        return [] if (tokens[1:] % 2).any() else [0, 2, 4]

    prefixes = random_prefixes(0, [0])
    prefixes.tree.tokens[:, 0] = 0
    tree, scores = prefixes.tree, torch.zeros(*prefixes.tree.tokens.shape, VOCAB)
    got = ours([hf.PrefixConstrainedLogitsProcessor(allowed, 1)], scores, prefixes)
    odd = (tree.ancestors & (tree.tokens % 2 == 1)[:, None]).any(-1)  # [B, N], an odd token on the way
    assert odd.any()
    assert not odd.all()
    assert torch.equal(got[odd], scores[odd])
    assert (got[~odd].isfinite().nonzero()[:, 1].unique() == torch.tensor([0, 2, 4])).all()


def test_an_error_of_a_users_processor_where_a_draw_can_lead_is_raised() -> None:
    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 32:
            raise ValueError("too long for me")
        return scores

    prefixes = random_prefixes(0)
    with pytest.raises(ValueError, match="too long for me"):
        ours([fails], torch.zeros(*prefixes.tree.tokens.shape, VOCAB), prefixes)


def test_a_users_processor_never_sees_a_text_as_long_as_the_limit() -> None:
    prefixes, longest = random_prefixes(0), []
    prefixes = replace(prefixes, limit=prefixes.length + 3)

    def watch(input_ids: Tensor, scores: Tensor) -> Tensor:
        longest.append(input_ids.shape[1])
        return scores + 1

    scores = random_scores(0, prefixes)
    expected = torch.where((prefixes.tree.depth < 2)[..., None], scores + 1, scores)
    torch.testing.assert_close(ours([watch], scores, prefixes), expected)
    assert max(longest) == int(prefixes.limit.max()) - 1


class MyWatermark(hf.WatermarkLogitsProcessor):
    pass


@pytest.mark.parametrize(
    ("processor", "argument"),
    [
        (hf.WatermarkLogitsProcessor(VOCAB, "cpu"), "watermarking_config"),
        (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None), "guidance_scale"),
        (hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(1, 4).long()), "encoder_no_repeat_ngram_size"),
        (MyWatermark(VOCAB, "cpu"), "watermarking_config"),
    ],
)
def test_a_processor_that_a_tree_cannot_honour_is_refused_by_name(processor: LogitsProcessor, argument: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(processor).__name__} .*Remove {argument} "):
        read([TOP_K, processor])


def test_every_class_of_hugging_face_is_supported_or_refused() -> None:
    """Fails when a new release brings a processor that nobody has looked at."""
    known = set(READERS) | set(REFUSED)
    assert not set(READERS) & set(REFUSED)
    classes = inspect.getmembers(hf, inspect.isclass)
    theirs = {name for name, kind in classes if issubclass(kind, LogitsProcessor) and kind.__module__ == hf.__name__}
    assert theirs - {"LogitsProcessor"} <= known
    tested = {type(make(WIDTH)).__name__ for make in CASES.values()} | {"PrefixConstrainedLogitsProcessor"}
    assert tested == set(READERS) | {"TemperaturePerRow"}


def test_a_bias_outside_the_vocabulary_is_an_error_as_in_hugging_face() -> None:
    prefixes, scores = random_inputs(0)
    with pytest.raises(ArgumentError, match="token 40, but the vocabulary has 40"):
        ours([hf.NoBadWordsLogitsProcessor([[1, 40]])], scores, prefixes)
