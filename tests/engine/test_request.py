"""What a request is made of beside its prompts: rows to return, limits and padding."""

import pytest
import torch

from helpers.models import CONTEXT, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError

IDS, MASK = uneven_batch()


def test_fewer_than_one_sequence_a_prompt_is_refused(engine):
    with pytest.raises(ArgumentError, match="num_return_sequences"):
        engine.generate(IDS, MASK, num_return_sequences=0)


@pytest.mark.parametrize("many", [(1 << 63) - 1, 1 << 70])
def test_the_context_ends_a_text_that_may_be_longer_than_any_number_of_the_machine(engine, many):
    out = engine.generate(IDS, MASK, do_sample=False, eos_token_id=None, max_new_tokens=many)
    expected = engine.generate(IDS, MASK, do_sample=False, eos_token_id=None, max_new_tokens=CONTEXT)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("ends", [[70, 12], [12, 70], [12]])
@pytest.mark.parametrize("pad", [None, 5])
def test_rows_that_ended_are_padded_as_transformers_pads_them(ends, pad):
    model = tiny_model("llama")
    model.generation_config.pad_token_id = None
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False, eos_token_id=None)
    early = [token for token in plain[1, IDS.shape[1] :].tolist() if token not in plain[0, IDS.shape[1] :]]
    ends = [early[0] if end == 12 else end for end in ends]
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ends, "pad_token_id": pad}
    expected = model.generate(IDS, attention_mask=MASK, **arguments)
    padded = with_tree(model, tiny_drafter(), 3, 3).generate(IDS, MASK, **arguments)
    assert torch.equal(padded, expected)
    assert expected[1, -1] == (ends[0] if pad is None else pad)
