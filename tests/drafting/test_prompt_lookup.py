"""Prompt lookup: drafts from the row's own text."""

import pytest
import torch

from helpers.models import paged, tiny_model, uneven_batch
from redrafter import ArgumentError, PromptLookup
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.drafting.proposer import State


def drafts(text, *, ngram=2, draft_len=4, room=6):
    tokens = torch.tensor([text + [99] * room])
    state = State(tokens, torch.tensor([len(text) - 1]), torch.zeros(1, 4), torch.ones(1, dtype=torch.bool))
    tree = PromptLookupProposer(ngram, draft_len).propose(state, None, None, None, None)
    assert tree.tokens[0, 0] == text[-1]
    return tree.tokens[0, 1:].tolist()


def test_what_followed_the_same_words_is_drafted():
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert drafts([1, 2, 3, 8, 1, 2, 4, 9, 1, 2]) == [4, 9, 1, 2]  # the latest occurrence


def test_a_longer_match_is_better_than_a_later_one():
    assert drafts([1, 2, 3, 5, 5, 2, 9, 9, 1, 2]) == [3, 5, 5, 2]
    assert drafts([1, 2, 3, 5, 5, 2, 9, 9, 1, 2], ngram=1) == [9, 9, 1, 2]


def test_fewer_words_serve_where_so_many_never_stood_together():
    assert drafts([7, 2, 3, 4, 9, 2]) == [3, 4, 9, 2]


def test_a_loop_goes_on():
    assert drafts([5, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert drafts([5, 5]) == [5, 5, 5, 5]


def test_nothing_found_is_no_error():
    assert drafts([1, 2, 3]) == [3, 3, 3, 3]
    assert drafts([1], ngram=3) == [1, 1, 1, 1]


@pytest.mark.parametrize("on", [lambda engine: engine, paged])
@pytest.mark.parametrize("ngram, draft_len", [(1, 1), (2, 4), (3, 10)])
def test_the_text_is_that_of_model_generate(llama, on, ngram, draft_len):
    ids, mask = uneven_batch()
    model = tiny_model("llama")
    engine = on(PromptLookup.from_pretrained(model, ngram=ngram, draft_len=draft_len))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    out = engine.generate(ids, mask, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3, "max_new_tokens": 30}
    plain = engine.generate(ids, mask, speculate=False, **sampling)
    assert torch.equal(engine.generate(ids, mask, **sampling), plain)


def test_text_that_repeats_takes_few_steps():
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    engine = PromptLookup.from_pretrained(model, draft_len=4)
    prompt = torch.tensor([[5, 5, 5, 5]])
    out = engine.generate(prompt, max_new_tokens=41, do_sample=False, eos_token_id=-1, return_dict_in_generate=True)
    assert out.sequences[0, 4:].tolist() == [0] * 41  # every logit is 0: the first id wins, always
    assert out.stats.tokens_per_step > 4.4


@pytest.mark.parametrize(("name", "value"), [("ngram", 0), ("draft_len", 0), ("ngram", 1.5), ("draft_len", True)])
def test_numbers_that_make_no_proposer_are_refused(llama, name, value):
    with pytest.raises(ArgumentError, match=name):
        PromptLookup.from_pretrained(llama, **{name: value})
