"""What `generate` takes, gives back and refuses."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from helpers.generation import Collect, Steps, letters
from helpers.models import CONTEXT, HIDDEN, VOCAB, scripted_engine, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, MismatchError, ReDrafter, UnsupportedError

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def engine(llama):
    return with_tree(llama, tiny_drafter(), 5, 5)


@pytest.fixture(scope="module")
def oracle(llama):
    script = llama.generate(IDS[:1], max_new_tokens=40, do_sample=False)
    return scripted_engine(llama, script, 2, 5)


def test_a_streamer_gets_what_model_generate_would_give_it(llama, engine):
    ours, theirs = Collect(), Collect()
    engine.generate(IDS, MASK, streamer=ours, **GREEDY)
    llama.generate(IDS, attention_mask=MASK, streamer=theirs, **GREEDY)
    assert torch.equal(torch.cat(ours.columns, 1), torch.cat(theirs.columns, 1))
    assert ours.ended


def test_a_step_streamer_gets_each_rows_tokens_and_how_many_were_drafts(oracle):
    steps = Steps()
    out = oracle.generate(IDS[:1], streamer=steps, return_dict_in_generate=True, **GREEDY)
    assert steps.texts[0] == out.sequences[0, IDS.shape[1] :].tolist()
    assert steps.drafts == out.stats.accepted > 0
    assert steps.ends == 1


def test_the_custom_generate_adapter_gives_the_same(llama, engine):
    arguments = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "repetition_penalty": 1.2}
    direct = engine.generate(IDS, MASK, seed=3, **arguments)
    adapted = llama.generate(IDS, attention_mask=MASK, custom_generate=engine.custom_generate(seed=3), **arguments)
    assert torch.equal(direct, adapted)


def test_the_adapter_streams_and_returns_statistics(llama, engine):
    steps = Steps()
    out = llama.generate(
        IDS,
        attention_mask=MASK,
        custom_generate=engine.custom_generate(streamer=steps),
        return_dict_in_generate=True,
        **GREEDY,
    )
    assert len(steps.texts) == 4
    assert out.stats.steps > 0


def test_the_adapter_belongs_to_its_model(engine):
    with pytest.raises(ArgumentError, match="another model"):
        tiny_model("qwen2").generate(IDS, custom_generate=engine.custom_generate(), **GREEDY)


def test_statistics_add_up(oracle):
    out = oracle.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    stats = out.stats
    assert stats.emitted == 29  # the first token is the prefill's
    assert stats.accepted == sum(stats.accepted_by_depth)
    assert stats.drafted == 10 * stats.steps
    assert stats.tokens_per_step == 29 / stats.steps
    assert stats.rows[0].steps == stats.steps == 5
    assert stats.seeds is None


@pytest.mark.parametrize("many", [(1 << 63) - 1, 1 << 70])
def test_the_context_ends_a_text_that_may_be_longer_than_any_number_of_the_machine(engine, many):
    out = engine.generate(IDS, MASK, do_sample=False, eos_token_id=None, max_new_tokens=many)
    expected = engine.generate(IDS, MASK, do_sample=False, eos_token_id=None, max_new_tokens=CONTEXT)
    assert torch.equal(out, expected)


def test_eos_in_the_middle_of_an_accepted_path_ends_the_row_at_once(llama):
    plain = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=None)
    eos = plain[0, IDS.shape[1] + 8].item()
    expected = llama.generate(IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=[90, eos])
    steps = Steps()
    out = scripted_engine(llama, plain, 1, 20).generate(
        IDS[:1], max_new_tokens=30, do_sample=False, eos_token_id=[90, eos], streamer=steps
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


def test_a_users_own_criterion_is_asked_about_every_token_and_named_in_a_warning(llama, oracle):
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= IDS.shape[1] + 7] * len(input_ids))

    expected = llama.generate(IDS[:1], stopping_criteria=[StopAt()], max_new_tokens=30, do_sample=False)
    with pytest.warns(UserWarning, match="StopAt"):
        out = oracle.generate(IDS[:1], stopping_criteria=[StopAt()], max_new_tokens=30, do_sample=False)
    assert torch.equal(out, expected)
    assert out.shape[1] == IDS.shape[1] + 7


def test_a_users_own_processor_is_honoured_and_named_in_a_warning(llama, oracle):
    class NoRepeat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -2:], float("-inf"))

    expected = llama.generate(IDS[:1], logits_processor=[NoRepeat()], **GREEDY)
    with pytest.warns(UserWarning, match="NoRepeat"):
        assert torch.equal(oracle.generate(IDS[:1], logits_processor=[NoRepeat()], **GREEDY), expected)


def test_max_time_ends_early(engine):
    out = engine.generate(IDS, MASK, max_new_tokens=80, max_time=0.0, do_sample=False)
    assert out.shape[1] == IDS.shape[1] + 1


def test_max_length_keeps_its_padded_meaning(llama, engine):
    arguments = {"max_length": IDS.shape[1] + 5, "do_sample": False}
    expected = llama.generate(IDS, attention_mask=MASK, **arguments)
    assert torch.equal(engine.generate(IDS, MASK, **arguments), expected)


def test_a_generation_config_is_honoured(llama, engine):
    config = GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.5, pad_token_id=0)
    expected = llama.generate(IDS[:1], generation_config=config)
    assert torch.equal(engine.generate(IDS[:1], generation_config=config), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"max_new_token": 5}, ArgumentError, "max_new_tokens"),
        ({"num_beams": 4}, UnsupportedError, "num_beams=4"),
        ({"guidance_scale": 2.0}, UnsupportedError, "guidance_scale"),
        ({"penalty_alpha": 0.6}, UnsupportedError, "penalty_alpha"),
        ({"dola_layers": "low"}, UnsupportedError, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, UnsupportedError, "prompt_lookup_num_tokens"),
        ({"output_hidden_states": True}, UnsupportedError, "output_hidden_states"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions"),
        ({"cache_implementation": "static"}, UnsupportedError, "cache_implementation"),
        ({"inputs_embeds": torch.zeros(1)}, UnsupportedError, "inputs_embeds"),
        ({"past_key_values": object()}, UnsupportedError, "past_key_values"),
        ({"assistant_model": object()}, UnsupportedError, "assistant_model"),
        ({"encoder_repetition_penalty": 1.2}, UnsupportedError, "encoder_repetition_penalty"),
        ({"temperature": -1.0, "do_sample": True}, ArgumentError, "temperature"),
        ({"temperature": [1.0, 2.0], "do_sample": True}, ArgumentError, "one per output row"),
        ({"seed": [1, 2], "do_sample": True}, ArgumentError, "2 entries for 4 output rows"),
        ({"seed": "a", "do_sample": True}, ArgumentError, "a seed is an int"),
        ({"seed": -1, "do_sample": True}, ArgumentError, "a seed is an int"),
        ({"stop_strings": ["x"]}, ArgumentError, "tokenizer"),
        ({"num_return_sequences": 0}, ArgumentError, "num_return_sequences"),
        ({"max_new_tokens": 0}, ArgumentError, "max_new_tokens"),
        ({"num_return_sequences": 2, "do_sample": False}, ArgumentError, "num_return_sequences"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine, arguments, error, named):
    with pytest.raises(error, match=named):
        engine.generate(IDS, MASK, **arguments)


def test_bad_inputs_are_named(engine):
    right = MASK.flip(1)
    for ids, mask, named in (
        (torch.zeros(1, 0, dtype=torch.long), None, "prompt is empty"),
        (torch.zeros(0, 3, dtype=torch.long), None, "prompt is empty"),
        (torch.tensor([5, 6]), None, r"\[batch, length\]"),
        ([[5, 6]], None, "list"),
        (torch.tensor([[0.5]]), None, "integer"),
        (torch.tensor([[5, VOCAB]]), None, f"token id {VOCAB} is out of range"),
        (torch.tensor([[5, -1]]), None, "token id -1"),
        (IDS, MASK[:, 1:], "shape of input_ids"),
        (IDS, MASK[:2], "shape of input_ids"),
        (IDS, right, "left-padded"),
        (IDS, MASK * 0, "no token"),
        (torch.full((1, CONTEXT), 5), None, f"{CONTEXT} tokens and the target's context is {CONTEXT}"),
    ):
        with pytest.raises(ArgumentError, match=named):
            engine.generate(ids, mask, **GREEDY)


def test_ids_may_be_of_either_integer_width(llama, engine):
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(engine.generate(IDS.int(), MASK.bool(), **GREEDY), expected)


def test_a_prompt_one_short_of_the_context_writes_one_token(llama, engine):
    ids = torch.full((1, CONTEXT - 1), 5)
    assert engine.generate(ids, max_length=CONTEXT, do_sample=False).shape[1] == CONTEXT


def test_a_drafter_of_another_base_is_refused_with_both_values(llama):
    for changes, named in (
        ({"hidden_size": 16}, rf"hidden size of 16, but the target \(LlamaForCausalLM\) has {HIDDEN}"),
        ({"vocab_size": 50}, rf"vocabulary of 50, but the target \(LlamaForCausalLM\) has {VOCAB}"),
        (
            {"base_embedding_norms": [1.0] * 8, "base_model": "other/base"},
            "its base is other/base",
        ),
    ):
        with pytest.raises(MismatchError, match=named):
            ReDrafter.from_pretrained(llama, tiny_drafter(**changes))


def test_shapes_that_cannot_be_searched_are_refused(llama):
    with pytest.raises(ArgumentError, match=f"num_beams={VOCAB + 1} is more than"):
        ReDrafter.from_pretrained(llama, tiny_drafter(), num_beams=VOCAB + 1)
    with pytest.raises(ArgumentError, match="num_beams=4 is more than the drafter's vocabulary of 3"):
        ReDrafter.from_pretrained(llama, tiny_drafter(draft_vocab_size=3), num_beams=4)
    for bad in (0, -2, 1.5, True):
        with pytest.raises(ArgumentError, match="node_budget"):
            ReDrafter.from_pretrained(llama, tiny_drafter(), node_budget=bad)


def test_a_draft_length_past_the_training_is_a_warning(llama):
    with pytest.warns(UserWarning, match="draft_len_per_beam=6 is more than the 5 steps"):
        ReDrafter.from_pretrained(llama, tiny_drafter(trained_draft_len=5), draft_len_per_beam=6)


def test_a_reduced_draft_vocabulary_changes_no_token(llama):
    drafter = tiny_drafter(draft_vocab_size=20)
    drafter.draft_ids.copy_(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:20])
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
    engine = with_tree(llama, drafter, 5, 5)
    assert torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)
    sampled = {"max_new_tokens": 12, "do_sample": True, "seed": 4}
    assert torch.equal(engine.generate(IDS, MASK, **sampled), engine.generate(IDS, MASK, speculate=False, **sampled))


def test_the_defaults_come_from_the_drafters_config(llama):
    engine = ReDrafter.from_pretrained(llama, tiny_drafter(draft_beams=3, draft_len_per_beam=4), node_budget=99)
    assert (engine.proposer.beams, engine.proposer.depth, engine.proposer.nodes) == (3, 4, 13)
    assert ReDrafter.from_pretrained(llama, tiny_drafter()).proposer.nodes < 26  # a smaller budget on a CPU
