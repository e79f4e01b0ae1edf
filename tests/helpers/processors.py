"""Logits processors of Hugging Face in the combinations that tests of exactness go through."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.engine.arguments import split_own

# What may stand between the logits and the draw. Each is checked greedy against `model.generate` where it applies
# there, and sampling against undrafted decoding in the same engine.
PROCESSORS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.01},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 16},
    "bad_words_ids": {"bad_words_ids": [[5], [17, 3], [8, 9, 10]]},
    "sequence_bias": {"sequence_bias": {(4,): 2.0, (6, 7): -3.0}},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": -2.0, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {4: 3.0, 6: -100.0}},
    "suppress_tokens": {"suppress_tokens": [3, 4, 5, 60]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 50))},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.3)},
    "eos_list": {"eos_token_id": [2, 11, 30, 31, 32]},
    "many": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


class TokenPenalties(LogitsProcessor):
    """OpenAI's penalties, of tokens after a prompt of `width`."""

    def __init__(self, frequency: float, presence: float, width: int):
        self.frequency, self.presence, self.width = frequency, presence, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids[:, self.width :]
        count = torch.zeros_like(scores).scatter_add(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - (self.frequency * count + self.presence * (count > 0))


def in_their_terms(arguments: dict[str, Any], width: int) -> dict[str, Any]:
    """Return arguments of `generate` as `model.generate` takes them, after prompts of `width` tokens."""
    others, own = split_own(arguments)
    if bias := own.pop("logit_bias", None):
        others["sequence_bias"] = {(token,): value for token, value in bias.items()}
    if own:
        penalties = TokenPenalties(own.get("frequency_penalty", 0.0), own.get("presence_penalty", 0.0), width)
        others["logits_processor"] = [penalties]
    return others


class EndOfThought(LogitsProcessor):
    """Forces token `end` after `budget` tokens of a thought, which `begin` opens behind a prompt of `width` tokens."""

    def __init__(self, budget: int, end: int, begin: list[int], width: int):
        self._budget, self._end, self._begin, self._width = budget, end, begin, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            written, opened = ids[self._width :], len(self._begin)
            thought = written[opened:]
            if written[:opened] == self._begin and len(thought) == self._budget and self._end not in thought:
                scores[row] = -torch.inf
                scores[row, self._end] = 0.0
        return scores
