"""Texts end where `model.generate` ends them: by end tokens, stop strings, lengths, time and criteria of a user."""

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria

from helpers.generation import Steps, letters
from helpers.models import scripted_engine, uneven_batch

IDS, MASK = uneven_batch()


def test_eos_in_the_middle_of_an_accepted_path_ends_the_row_at_once(llama):
    plain = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=None)
    eos = plain[0, IDS.shape[1] + 8].item()
    expected = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=[90, eos, 10**6])
    steps = Steps()
    out = scripted_engine(llama, plain, 1, 20).generate(
        IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=[90, eos, 10**6], streamer=steps
    )
    assert torch.equal(out, expected)
    assert out.shape[1] < plain.shape[1]
    assert steps.texts[0] == expected[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("depth", [1, 6])
def test_stop_strings_stop_where_model_generate_stops(llama, depth):
    tokenizer = letters()
    plain = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=None)
    stop = [tokenizer.decode(plain[0, IDS.shape[1] + 8 : IDS.shape[1] + 10]), "never"]
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "tokenizer": tokenizer}
    expected = llama.generate(IDS[:1], stop_strings=stop, **arguments)
    engine = scripted_engine(llama, plain, 1, depth)
    assert torch.equal(engine.generate(IDS[:1], stop_strings=stop, **arguments), expected)
    config = GenerationConfig(stop_strings=stop, max_new_tokens=30, do_sample=False, pad_token_id=0)
    again = engine.generate(IDS[:1], generation_config=config, tokenizer=tokenizer, eos_token_id=None)
    assert torch.equal(again, expected)
    assert expected.shape[1] < plain.shape[1]


@pytest.mark.parametrize("depth", [1, 6])
def test_drafts_that_follow_a_stop_string_are_not_counted_as_accepted(llama, depth):
    tokenizer = letters()
    plain = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=None)
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "tokenizer": tokenizer}
    engine, ends = scripted_engine(llama, plain, 1, depth), set()
    for end in range(4, 18):
        stop = tokenizer.decode(plain[0, IDS.shape[1] + end - 2 : IDS.shape[1] + end])
        out = engine.generate(IDS[:1], stop_strings=[stop], return_dict_in_generate=True, **arguments)
        written, stats = out.sequences.shape[1] - IDS.shape[1], out.stats
        whole, rest = divmod(written - 1, depth + 1)  # all drafts are right, and no step drew the first token
        assert stats.steps == whole + (rest > 0)
        assert stats.drafted == depth * stats.steps
        assert stats.accepted == sum(stats.accepted_by_depth) == depth * whole + min(rest, depth)
        assert stats.emitted == written - 1
        ends.add(rest)
    assert ends == set(range(depth + 1)), "the string ended after each node of a tree"


def test_a_users_own_criterion_is_asked_about_every_token_and_named_in_a_warning(llama):
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= IDS.shape[1] + 7] * len(input_ids))

    expected = llama.generate(IDS[:1], stopping_criteria=[StopAt()], max_new_tokens=30, do_sample=False)
    oracle = scripted_engine(llama, llama.generate(IDS[:1], max_new_tokens=40, do_sample=False), 2, 5)
    with pytest.warns(UserWarning, match="StopAt"):
        out = oracle.generate(IDS[:1], stopping_criteria=[StopAt()], max_new_tokens=30, do_sample=False)
    assert torch.equal(out, expected)
    assert out.shape[1] == IDS.shape[1] + 7
