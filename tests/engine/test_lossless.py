"""The output is what plain decoding gives: greedy against `model.generate`, sampling against `speculate=False`."""

import pytest
import torch

from helpers.models import ARCHITECTURES, row_texts, scripted_engine, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.processors import PROCESSORS, in_their_terms
from redrafter.sampling.noise import gumbel

TREES = [(1, 1), (1, 5), (5, 5), (10, 3)]
NEW = 24


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=[1, 4], ids=lambda rows: f"{rows} rows")
def batch(request):
    """Prompts and their mask."""
    ids, mask = uneven_batch()
    return ids[: request.param], mask[: request.param]


@pytest.fixture(scope="module")
def expected(model, batch):
    """What `model.generate` writes."""
    ids, mask = batch
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def write_greedily(engine, batch):
    return engine.generate(*batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)


@pytest.mark.parametrize(("beams", "depth"), TREES)
def test_greedy_equals_model_generate(model, batch, expected, beams, depth):
    engine = with_tree(model, tiny_drafter(), beams, depth)
    assert torch.equal(write_greedily(engine, batch).sequences, expected)
    plain = engine.generate(*batch, max_new_tokens=NEW, do_sample=False, speculate=False)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize(("beams", "depth"), TREES)
def test_greedy_equals_model_generate_where_every_draft_is_right(model, batch, expected, beams, depth):
    out = write_greedily(scripted_engine(model, row_texts(expected, batch[1]), beams, depth), batch)
    assert torch.equal(out.sequences, expected)
    assert out.stats.tokens_per_step > min(depth + 1, 4) * 0.8


@pytest.mark.parametrize(("beams", "depth"), TREES)
def test_greedy_equals_model_generate_where_every_draft_is_wrong(model, batch, expected, beams, depth):
    out = write_greedily(scripted_engine(model, row_texts(expected, batch[1]), beams, depth, offset=37), batch)
    assert torch.equal(out.sequences, expected)
    assert out.stats.accepted == 0


ONLY_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "many"}


@pytest.mark.parametrize("name", sorted(set(PROCESSORS) - ONLY_SAMPLING))
def test_greedy_with_a_processor_equals_model_generate(llama, name):
    ids, _ = uneven_batch(rows=1)
    arguments = {"max_new_tokens": NEW, "do_sample": False} | PROCESSORS[name]
    expected = llama.generate(ids, **in_their_terms(arguments, ids.shape[1]))
    for engine in (with_tree(llama, tiny_drafter(), 5, 5), scripted_engine(llama, expected, 3, 5)):
        assert torch.equal(engine.generate(ids, **arguments), expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_same_seed_draws_the_same_tokens_however_it_is_decoded(llama, name):
    ids, mask = uneven_batch()
    arguments = {"max_new_tokens": NEW, "do_sample": True} | PROCESSORS[name]
    seeds = [11, 12, 13, 14]
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    plain = engine.generate(ids, mask, seed=seeds, speculate=False, **arguments)
    script = row_texts(plain, mask)
    engines = [with_tree(llama, tiny_drafter(), beams, depth) for beams, depth in TREES]
    engines += [with_tree(llama, tiny_drafter(), 5, 5, nodes=9), scripted_engine(llama, script, 3, 5)]
    for speculating in engines:
        assert torch.equal(speculating.generate(ids, mask, seed=seeds, **arguments), plain)
    if name in ("min_length", "forced_eos_token_id"):
        return  # these count to the padded width, which a row alone does not have
    for row in range(4):
        prompt = ids[row : row + 1, mask[row].argmax() :]
        alone = engine.generate(prompt, seed=seeds[row], **arguments)[0, prompt.shape[1] :]
        assert torch.equal(alone, plain[row, ids.shape[1] :][: len(alone)])


def test_rows_may_have_their_own_temperatures(llama):
    ids, mask = uneven_batch()
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    temperatures = [0.3, 0.7, 1.0, 1.6]
    arguments = {"max_new_tokens": NEW, "do_sample": True, "repetition_penalty": 1.2}
    together = engine.generate(ids, mask, seed=5, temperature=temperatures, **arguments)
    plain = engine.generate(ids, mask, seed=5, temperature=temperatures, speculate=False, **arguments)
    assert torch.equal(together, plain)
    for row, temperature in enumerate(temperatures):
        prompt = ids[row : row + 1, mask[row].argmax() :]
        alone = engine.generate(prompt, seed=5 + row, temperature=temperature, **arguments)[0, prompt.shape[1] :]
        assert torch.equal(alone, together[row, ids.shape[1] :][: len(alone)])


def test_returned_sequences_differ_and_each_can_be_drawn_alone(llama):
    ids, mask = uneven_batch(rows=2)
    engine = with_tree(llama, tiny_drafter(), 5, 5)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True}
    out = engine.generate(ids, mask, seed=40, num_return_sequences=3, **arguments)
    assert out.stats.seeds == [40, 41, 42, 43, 44, 45]
    assert len({tuple(row.tolist()) for row in out.sequences}) == 6
    prompt = ids[1:, mask[1].argmax() :]
    alone = engine.generate(prompt, seed=44, **arguments).sequences[0, prompt.shape[1] :]
    assert torch.equal(alone, out.sequences[4, ids.shape[1] :][: len(alone)])


@pytest.mark.parametrize("draws", [{"do_sample": True, "seed": 3}, {"do_sample": False}])
def test_torchs_generator_gives_nothing_but_seeds_that_no_call_gives(draws, llama):
    [ids, mask], engine = uneven_batch(), with_tree(llama, tiny_drafter(), 5, 5)
    before = torch.get_rng_state()
    engine.generate(ids, mask, max_new_tokens=8, **draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_and_logits_are_those_of_model_generate(llama):
    ids, _ = uneven_batch(rows=1)
    arguments = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = llama.generate(ids, **arguments)
    out = scripted_engine(llama, expected.sequences, 3, 4).generate(ids, **arguments)
    assert len(out.scores) == len(out.logits) == len(expected.scores)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_generation_to_the_exact_end_of_the_context_works(architecture):
    model = tiny_model(architecture, max_position_embeddings=40)
    ids, mask = uneven_batch(rows=3)
    expected = model.generate(ids, attention_mask=mask, max_length=40, do_sample=False, eos_token_id=None)
    for engine in (with_tree(model, tiny_drafter(), 5, 5), scripted_engine(model, row_texts(expected, mask), 3, 5)):
        out = engine.generate(ids, mask, max_length=40, do_sample=False, eos_token_id=None)
        assert torch.equal(out, expected)
        assert out.shape == (3, 40)


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
    out = with_tree(llama, tiny_drafter(), 5, 5).generate(
        ids,
        mask,
        max_new_tokens=NEW,
        do_sample=True,
        temperature=0.8,
        eos_token_id=None,
        seed=[21, 5],
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, seed in enumerate(out.stats.seeds):
        positions = int(mask[row].sum()) + torch.arange(NEW)[None]
        noise = gumbel(torch.tensor([seed]), positions, torch.arange(llama.config.vocab_size))[0]  # [NEW, V]
        scores = torch.stack([column[row] for column in out.scores])
        assert torch.equal((scores + noise).argmax(-1), out.sequences[row, ids.shape[1] :])
