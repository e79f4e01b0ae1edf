"""What is read of Hugging Face's processors and of users' own, and what is refused."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from helpers.hf_processors import (
    BAD_WORDS,
    BIASES,
    CASES,
    EOS,
    PROMPTS,
    STARTS,
    VOCAB,
    WIDTH,
    alone,
    ours,
    random_inputs,
    random_prefixes,
    random_scores,
    read,
    reference,
)
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.sampling.hf_processors import READERS, REFUSED
from redrafter.sampling.host_processors import PerNode


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
    processed = ours(make(WIDTH, padding), scores, prefixes, min_new_tokens=4)
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


TOP_K = hf.TopKLogitsWarper(5)


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
    assert tested == set(READERS)


def test_a_bias_outside_the_vocabulary_is_an_error_as_in_hugging_face() -> None:
    prefixes, scores = random_inputs(0)
    with pytest.raises(ArgumentError, match="token 40, but the vocabulary has 40"):
        ours([hf.NoBadWordsLogitsProcessor([[1, 40]])], scores, prefixes)
