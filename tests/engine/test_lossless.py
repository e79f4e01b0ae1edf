"""The output is what undrafted decoding gives: greedy against `model.generate`, sampling against `speculate=False`."""

import pytest
import torch

from helpers.generation import same_alone, same_as_model, same_undrafted
from helpers.models import ARCHITECTURES, row_texts, scripted_engine, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.processors import PROCESSORS, in_their_terms
from redrafter.sampling.noise import gumbel

TREES = [(1, 1), (1, 5), (5, 5), (10, 3)]
NEW = 24
IDS, MASK = uneven_batch()


@pytest.mark.costly
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_model_generate_whether_drafts_are_right_or_wrong(architecture, rows):
    model, batch = tiny_model(architecture), (IDS[:rows], MASK[:rows])
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    script = row_texts(same_as_model(with_tree(model, tiny_drafter(), 1, 1), *batch, **greedy), batch[1])
    for beams, depth in TREES:
        engine = with_tree(model, tiny_drafter(), beams, depth)
        expected = same_as_model(engine, *batch, **greedy)
        right, wrong = (
            scripted_engine(model, script, beams, depth, offset).generate(
                *batch, return_dict_in_generate=True, **greedy
            )
            for offset in (0, 37)
        )
        assert torch.equal(right.sequences, expected)
        assert torch.equal(wrong.sequences, expected)
        assert right.stats.tokens_per_step > min(depth + 1, 4) * 0.8
        assert wrong.stats.accepted == 0
    assert torch.equal(engine.generate(*batch, speculate=False, **greedy), expected)


ONLY_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "many"}


@pytest.mark.parametrize("name", sorted(set(PROCESSORS) - ONLY_SAMPLING))
def test_greedy_with_a_processor_equals_model_generate(llama, name):
    arguments = {"max_new_tokens": NEW, "do_sample": False} | PROCESSORS[name]
    expected = llama.generate(IDS[:1], **in_their_terms(arguments, IDS.shape[1]))
    for engine in (with_tree(llama, tiny_drafter(), 5, 5), scripted_engine(llama, expected, 3, 5)):
        assert torch.equal(engine.generate(IDS[:1], **arguments), expected)


@pytest.mark.costly
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_same_seed_draws_the_same_tokens_however_it_is_decoded(llama, name):
    arguments = {"max_new_tokens": NEW, "do_sample": True, "seed": [11, 12, 13, 14]} | PROCESSORS[name]
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    plain = same_undrafted(engine, IDS, MASK, **arguments)
    engines = [with_tree(llama, tiny_drafter(), beams, depth) for beams, depth in TREES]
    engines += [with_tree(llama, tiny_drafter(), 5, 5, nodes=9), scripted_engine(llama, row_texts(plain, MASK), 3, 5)]
    for speculating in engines:
        assert torch.equal(speculating.generate(IDS, MASK, **arguments), plain)
    if name not in ("min_length", "forced_eos_token_id"):  # which count to the padded width, that a row alone has not
        same_alone(engine, IDS, MASK, plain, **arguments)


def test_rows_may_have_their_own_temperatures(llama):
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "repetition_penalty": 1.2, "seed": [5, 6, 7, 8]}
    arguments["temperature"] = [0.3, 0.7, 1.0, 1.6]
    same_alone(engine, IDS, MASK, same_undrafted(engine, IDS, MASK, **arguments), **arguments)


def test_returned_sequences_differ_and_each_can_be_drawn_alone(llama):
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True}
    out = engine.generate(IDS[:2], MASK[:2], seed=40, num_return_sequences=3, **arguments)
    assert out.stats.seeds == [40, 41, 42, 43, 44, 45]
    assert len({tuple(row.tolist()) for row in out.sequences}) == 6
    prompt = IDS[1:2, MASK[1].argmax() :]
    alone = engine.generate(prompt, seed=44, **arguments).sequences[0, prompt.shape[1] :]
    assert torch.equal(alone, out.sequences[4, IDS.shape[1] :][: len(alone)])


@pytest.mark.parametrize("draws", [{"do_sample": True, "seed": 3}, {"do_sample": False}])
def test_torchs_generator_gives_nothing_but_seeds_that_no_call_gives(draws, llama):
    before = torch.get_rng_state()
    with_tree(llama, tiny_drafter(), 5, 5).generate(IDS, MASK, max_new_tokens=8, **draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_and_logits_are_those_of_model_generate(llama):
    arguments = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.3}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = llama.generate(IDS[:1], **arguments)
    out = scripted_engine(llama, expected.sequences, 3, 4).generate(IDS[:1], **arguments)
    assert len(out.scores) == len(out.logits) == len(expected.scores)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_generation_to_the_exact_end_of_the_context_works(architecture):
    model = tiny_model(architecture, max_position_embeddings=40)
    ids, mask = uneven_batch(rows=3)
    text = same_as_model(with_tree(model, tiny_drafter(), 5, 5), ids, mask, max_length=40, eos_token_id=None)
    assert text.shape == (3, 40)
    same_as_model(scripted_engine(model, row_texts(text, mask), 3, 5), ids, mask, max_length=40, eos_token_id=None)


def test_a_row_that_overshot_its_limit_stands_still_while_others_go_on(llama):
    ids, mask = uneven_batch()
    new = 1 + 2 * 8 + 1  # the prefill's token, two steps of eight, and one token: the third step overshoots by seven
    arguments = {"do_sample": False, "eos_token_id": None}
    longer = llama.generate(ids, attention_mask=mask, max_new_tokens=new + 8, **arguments)
    expected = longer[:, : ids.shape[1] + new]
    script = row_texts(longer, mask)
    script[1:] += 37  # the first row is always guessed right, the others never
    arguments |= {"max_new_tokens": new, "return_dict_in_generate": True}
    out = scripted_engine(llama, script, 1, 7).generate(ids, mask, **arguments)
    assert torch.equal(out.sequences, expected)
    steps = [row.steps for row in out.stats.rows]
    assert steps == [3] + [new - 1] * 3


def test_a_token_is_the_argmax_of_its_scores_and_the_noise_of_its_seed_and_position(llama):
    ids, mask = uneven_batch(rows=2)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "seed": [21, 5], "eos_token_id": None}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    out = with_tree(llama, tiny_drafter(), 5, 5).generate(ids, mask, **arguments)
    for row, seed in enumerate(out.stats.seeds):
        positions = int(mask[row].sum()) + torch.arange(NEW)[None]
        noise = gumbel(torch.tensor([seed]), positions, torch.arange(llama.config.vocab_size))[0]  # [NEW, V]
        scores = torch.stack([column[row] for column in out.scores])
        assert torch.equal((scores + noise).argmax(-1), out.sequences[row, ids.shape[1] :])
