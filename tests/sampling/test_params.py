"""Lists of processors, folded into parameters of rows: a step applies what the list says, in the order of the list."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from helpers.scheduling import make_sequence
from redrafter.sampling.hf_processors import fold_rows, read_processors
from redrafter.sampling.params import SamplingParams
from redrafter.sampling.prefixes import Prefixes
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.tree.token_tree import tree_of

VOCAB, WIDTH, EOS = 40, 6, [2, 5]
PROMPTS, LENGTHS = [2, 6], [6, 7]


class Halve(LogitsProcessor):
    """A user's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2 + input_ids[:, -1:]


BIAS, BANNED = hf.SequenceBiasLogitsProcessor({(3,): 2.0}), hf.NoBadWordsLogitsProcessor([[7], [8]], EOS)
REPETITION, NGRAM = hf.RepetitionPenaltyLogitsProcessor(1.3), hf.NoRepeatNGramLogitsProcessor(2)
MINIMUM, OTHER_MINIMUM = (hf.MinNewTokensLengthLogitsProcessor(WIDTH, 9, eos) for eos in (EOS, [9]))
IGNORED = hf.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=3)
HEAT, MORE = hf.TemperatureLogitsWarper(0.7), hf.TemperatureLogitsWarper(1.4)
TOP_K, TOP_P, MIN_P = hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.05)
ETA = hf.EpsilonLogitsWarper(0.02)
LISTS = {  # and how many of them are the caller's own, before and after the temperature
    "all by name": ([BIAS, REPETITION, BANNED, MINIMUM, HEAT, TOP_K, TOP_P, MIN_P], 0, 0),
    "some by name": ([REPETITION, MORE, TOP_P], 0, 0),
    "n-grams between": ([BIAS, REPETITION, NGRAM, MINIMUM, HEAT, TOP_K], 2, 0),
    "a user's own": ([REPETITION, Halve(), MORE, TOP_K], 1, 0),
    "a user's own first": ([Halve(), REPETITION, BANNED, HEAT], 3, 0),
    "part of the prompt does not count": ([IGNORED, HEAT], 1, 0),
    "other ends": ([OTHER_MINIMUM, MINIMUM, HEAT], 2, 0),
    "two temperatures": ([HEAT, MORE, TOP_K], 0, 2),
    "cuts the other way round": ([HEAT, TOP_P, TOP_K, MIN_P], 0, 2),
    "a cut that is none of ours": ([HEAT, TOP_K, ETA, MIN_P], 0, 2),
    "a bias after a penalty": ([REPETITION, BIAS, HEAT], 1, 0),
}


def trees() -> tuple[Prefixes, Tensor]:
    random = torch.Generator().manual_seed(3)
    nodes, length = 5, torch.tensor(LENGTHS)
    parents, depth = torch.tensor([[0, 0, 0, 1, 2]] * 2), torch.tensor([[0, 1, 1, 2, 2]] * 2)
    tree = tree_of(torch.randint(9, (2, nodes), generator=random), parents, depth, 2)
    tokens = torch.randint(9, (2, 20), generator=random).scatter_(1, length[:, None], tree.tokens[:, :1])
    prefixes = Prefixes(tokens, length, torch.tensor(PROMPTS), torch.tensor([20, 20]), tree, window=8)
    return prefixes, 3 * torch.randn(2, nodes, VOCAB, generator=random)


@pytest.mark.parametrize("name", LISTS)
def test_a_step_applies_what_the_list_says(name):
    given, before, after = LISTS[name]
    prefixes, logits = trees()
    processors, _ = read_processors(given, width=WIDTH, prompt=prefixes.prompt, vocabulary=VOCAB)
    expected = logits
    for processor in processors:
        expected = processor(expected, prefixes)
    rows = [
        SamplingParams(**values, stop_token_ids=frozenset(EOS))
        for values in fold_rows(processors, 2, EOS, sampled=True)
    ]
    assert [(len(row.extra), len(row.extra_last)) for row in rows] == [(before, after)] * 2
    sequences = [make_sequence([1] * prompt, 20 - prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]
    tensors = SamplingTensors(4, VOCAB, torch.device("cpu"), of_call=True)
    tensors.write(1, sequences)  # as rows are written and moved, in the middle of which nothing may be lost
    tensors.move(1, 0)
    tensors.move(2, 1)
    sampler = tensors.sampler(2, sequences)
    torch.testing.assert_close(sampler.process(logits, prefixes), expected, rtol=0, atol=0)
    torch.testing.assert_close(tensors.sampler_of(sequences).process(logits, prefixes), expected, rtol=0, atol=0)


def test_greedy_rows_keep_what_a_caller_gives_beside_the_config():
    processors, _ = read_processors([REPETITION, TOP_K], width=WIDTH, prompt=torch.tensor(PROMPTS), vocabulary=VOCAB)
    rows = fold_rows(processors, 2, EOS, sampled=False)
    assert [row["repetition_penalty"] for row in rows] == [pytest.approx(1.3)] * 2
    assert [len(row["extra"]) for row in rows] == [1, 1]
    assert "top_k" not in rows[0]


def test_tokens_that_are_forbidden_join_a_bias_whatever_stands_between():
    processors, _ = read_processors(
        [BIAS, REPETITION, BANNED], width=WIDTH, prompt=torch.tensor(PROMPTS), vocabulary=VOCAB
    )
    assert fold_rows(processors, 2, EOS, sampled=True)[1]["logit_bias"] == {3: 2.0, 7: -math.inf, 8: -math.inf}
