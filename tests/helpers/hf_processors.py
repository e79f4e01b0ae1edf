"""Random trees of texts, and what Hugging Face's own objects make of the scores at their nodes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from redrafter.sampling.hf_processors import read_processors
from redrafter.sampling.prefixes import Prefixes
from redrafter.tree.token_tree import tree_of

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


def read(given: list, prompt: Tensor | None = None, vocabulary: int = VOCAB, **more: int) -> tuple[list, list[str]]:
    prompt = torch.tensor(PROMPTS) if prompt is None else prompt
    return read_processors(given, width=WIDTH, prompt=prompt, vocabulary=vocabulary, **more)


def ours(given: list, scores: Tensor, prefixes: Prefixes, **more: int) -> Tensor:
    before = scores.clone()
    for processor in read(given, prefixes.prompt, scores.shape[-1], **more)[0]:
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
CHANGE_NOTHING = {  # on our random trees
    "top k above the vocabulary",
    "top p at 1",
    "no repeated n-gram longer than any text",
    "bad words that are all eos",
}
STARTS = [LENGTHS, [0, 6, 14], [1, 7, 15], [2, 30, 17], [23, 8, 36]]
