"""Prompt lookup: drafts from the row's own text."""

import pytest
import torch

from helpers.generation import ON_BOTH_CACHES, same_as_model, same_undrafted
from helpers.models import tiny_model, uneven_batch
from redrafter import ArgumentError, PromptLookup
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.drafting.proposer import State


def drafts(text, *, ngram=2, draft_len=4, room=6):
    tokens = torch.tensor([text + [99] * room])
    state = State(tokens, torch.tensor([len(text) - 1]), torch.zeros(1, 4), torch.ones(1, dtype=torch.bool))
    tree = PromptLookupProposer(ngram, draft_len).propose(state, None, None, None, None)
    assert tree.tokens[0, 0] == text[-1]
    return tree.tokens[0, 1:].tolist()


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


@ON_BOTH_CACHES
@pytest.mark.parametrize("ngram, draft_len", [(1, 1), (3, 10)])
def test_the_text_is_that_of_model_generate(llama, on, ngram, draft_len):
    engine = on(PromptLookup.from_pretrained(llama, ngram=ngram, draft_len=draft_len))
    same_as_model(engine, *uneven_batch(), max_new_tokens=40)
    same_undrafted(engine, *uneven_batch(), do_sample=True, temperature=0.8, top_k=0, seed=3, max_new_tokens=30)


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
