"""What `generate` takes, gives back and refuses."""

import copy
import inspect
import pickle
import random
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, set_seed

from helpers.generation import ON_BOTH_CACHES, Collect, Steps, noted, same_as_model, same_undrafted
from helpers.models import HIDDEN, VOCAB, scripted_engine, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import (
    ArgumentError,
    CheckpointError,
    DraftTarget,
    Engine,
    MismatchError,
    PromptLookup,
    ReDrafter,
    UnsupportedError,
)
from redrafter.engine import call
from redrafter.engine.options import EngineOptions
from redrafter.engine.request import row_seeds
from redrafter.engine.streamers import ColumnStream
from redrafter.formats.sources import open_drafter

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def engine(llama):
    return with_tree(llama, tiny_drafter(), 5, 5)


@pytest.fixture(scope="module")
def oracle(llama):
    script = llama.generate(IDS[:1], max_new_tokens=40, do_sample=False)
    return scripted_engine(llama, script, 2, 5)


@pytest.mark.parametrize("own", [lambda put: put, lambda put: SimpleNamespace(put=put.put, end=put.end)])
def test_a_streamer_or_what_is_only_like_one_gets_what_model_generate_would_give_it(llama, engine, own):
    ours, theirs = Collect(), Collect()
    engine.generate(IDS, MASK, streamer=own(ours), **GREEDY)
    llama.generate(IDS, attention_mask=MASK, streamer=theirs, **GREEDY)
    assert torch.equal(torch.cat(ours.columns, 1), torch.cat(theirs.columns, 1))
    assert ours.ended


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 4}])
@pytest.mark.parametrize("limit", [0, 1, 2, [0, 1, 5, None]])
def test_a_limit_of_drafts_changes_no_token_and_bounds_each_step(oracle, limit, how):
    prompts = IDS[:1].expand(4, -1)
    arguments = {"max_new_tokens": 24, "return_dict_in_generate": True, **how}
    out = oracle.generate(prompts, num_speculative_tokens=limit, **arguments)
    assert torch.equal(out.sequences, oracle.generate(prompts, speculate=False, **arguments).sequences)
    for row, most in zip(out.stats.rows, limit if isinstance(limit, list) else [limit] * 4, strict=True):
        accepted = [kept for _, kept in row.per_step]
        assert sum(accepted) == row.accepted
        if most is not None:
            assert max(accepted, default=0) == (most if not how["do_sample"] else max(accepted, default=0)) <= most
        if most == 0:
            assert row.draft_steps == 0


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (
            6,
            r"num_speculative_tokens must be within the drafts of this engine \(0 to 5; .*\), got 6",
        ),
        (-1, r"\(0 to 5; 0 for no drafts\), got -1"),
        (True, "an int or one per output row, got True"),
        ([1], "has 1 entries for 4 output rows"),
    ],
)
def test_a_limit_of_drafts_out_of_range_is_refused_with_the_range(oracle, limit, says):
    with pytest.raises(ArgumentError, match=says):
        oracle.generate(IDS[:1].expand(4, -1), num_speculative_tokens=limit, **GREEDY)
    with pytest.raises(ArgumentError, match="must be 0: nothing drafts here, got 2"):
        oracle.generate(IDS[:1], num_speculative_tokens=2, speculate=False, **GREEDY)


def test_rows_are_looked_at_once_for_the_columns_of_a_streamer_and_not_for_each_row(monkeypatch):
    looks = noted(monkeypatch, ColumnStream, "_send", lambda _, stream, ready: ready)
    made = random.Random(1)
    texts = [[made.randrange(9) for _ in range(made.randrange(1, 12))] for _ in range(200)]
    columns, left = Collect(), {row: list(text) for row, text in enumerate(texts)}
    stream = ColumnStream(columns, len(texts), pad=99)
    while left:
        row = made.choice(list(left))
        count = made.randrange(min(len(left[row]), 4) + 1)
        tokens, left[row] = left[row][:count], left[row][count:]
        stream.put_step(row, tokens, 0, ended=not left[row])
        if not left[row]:
            del left[row]
    assert looks == sorted(set(looks))  # each look completes columns: at most one look per column
    stream.end()
    longest = max(map(len, texts))
    padded = torch.tensor([text + [99] * (longest - len(text)) for text in texts])
    assert torch.equal(torch.cat(columns.columns, 1), padded)


def test_recorded_scores_hold_no_memory_of_drafts_that_were_refused(engine, monkeypatch):
    columns = noted(monkeypatch, call, "_columns", lambda _, rows: [*chain(*rows)])
    engine.generate(IDS, MASK, output_scores=True, output_logits=True, return_dict_in_generate=True, **GREEDY)
    kept = [*chain(*columns)]
    assert all(piece.untyped_storage().nbytes() == piece.numel() * 4 for piece in kept)
    assert len(kept) > 40


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_that_is_pickled_or_copied_says_what_to_do(engine, way):
    with pytest.raises(UnsupportedError, match="make one in each process with from_pretrained"):
        way(engine)


@pytest.mark.parametrize("drafter", ["my-drafter", None, 3])
def test_constructors_name_what_from_pretrained_takes(llama, engine, drafter):
    for make in (
        lambda: ReDrafter(llama, engine.drafter),
        lambda: ReDrafter(engine.target, drafter),
        lambda: DraftTarget(engine.target, drafter),
        lambda: DraftTarget(llama, engine.target),
        lambda: Engine("my-model", engine.undrafted),
    ):
        with pytest.raises(ArgumentError, match="from_pretrained takes names, directories and models of transformers"):
            make()


def test_a_step_streamer_gets_each_rows_tokens_and_how_many_were_drafts(oracle):
    steps = Steps()
    out = oracle.generate(IDS[:1], streamer=steps, return_dict_in_generate=True, **GREEDY)
    assert steps.texts[0] == out.sequences[0, IDS.shape[1] :].tolist()
    assert steps.drafts == out.stats.accepted > 0
    assert steps.ends == 1


def test_the_custom_generate_adapter_gives_the_same_and_belongs_to_its_model(llama, engine):
    arguments = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "repetition_penalty": 1.2}
    direct, steps = engine.generate(IDS, MASK, seed=3, **arguments), Steps()
    custom = engine.custom_generate(seed=3, streamer=steps)
    arguments |= {"attention_mask": MASK, "return_dict_in_generate": True}
    adapted = llama.generate(IDS, custom_generate=custom, **arguments)
    assert torch.equal(direct, adapted.sequences)
    assert len(steps.texts) == 4
    assert adapted.stats.steps > 0
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


def test_a_users_own_processor_is_honoured_and_named_in_a_warning(llama, oracle):
    class NoRepeat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -2:], float("-inf"))

    expected = llama.generate(IDS[:1], logits_processor=[NoRepeat()], **GREEDY)
    with pytest.warns(UserWarning, match="NoRepeat"):
        assert torch.equal(oracle.generate(IDS[:1], logits_processor=[NoRepeat()], **GREEDY), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 16}, rf"hidden size of 16, but the target \(LlamaForCausalLM\) has {HIDDEN}"),
        ({"vocab_size": 50}, rf"vocabulary of 50, but the target \(LlamaForCausalLM\) has {VOCAB}"),
        ({"base_embedding_norms": [1.0] * 8, "base_model": "other/base"}, "its base is other/base"),
    ],
)
def test_a_drafter_of_another_base_is_refused_with_both_values(llama, changes, named):
    with pytest.raises(MismatchError, match=named):
        ReDrafter.from_pretrained(llama, tiny_drafter(**changes))


@pytest.mark.parametrize(
    ("drafter", "shape", "named"),
    [
        ({}, {"num_beams": VOCAB + 1}, f"num_beams={VOCAB + 1} is more than"),
        ({"draft_vocab_size": 3}, {"num_beams": 4}, "num_beams=4 is more than the drafter's vocabulary of 3"),
        *(({}, {"node_budget": wrong}, "node_budget") for wrong in (0, -2, 1.5, True)),
    ],
)
def test_shapes_that_cannot_be_searched_are_refused(llama, drafter, shape, named):
    with pytest.raises(ArgumentError, match=named):
        ReDrafter.from_pretrained(llama, tiny_drafter(**drafter), **shape)


WRONG_IDS = {
    "a token twice": (torch.arange(20) // 2 * 2, "not different ids of its base: 0 occurs twice"),
    "an id past the end": (torch.arange(20) + VOCAB - 10, f"outside of the {VOCAB} ids of its base, such as {VOCAB}"),
    "a negative id": (torch.arange(20) - 1, "such as -1"),
    "another dtype": (torch.arange(20).int(), "as int32; ids are int64"),
    "too few": (torch.arange(19), "of 19 ids instead of 20"),
    "none": (None, "of 0 ids instead of 20"),
}


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_ids_that_a_drafter_cannot_draft_are_refused_wherever_it_comes_from(llama, tmp_path, wrong):
    ids, message = WRONG_IDS[wrong]
    drafter, good = tiny_drafter(draft_vocab_size=20), tiny_drafter(draft_vocab_size=20)
    drafter.draft_ids = ids
    engine = with_tree(llama, good, 2, 2)
    entries = [
        lambda: ReDrafter.from_pretrained(llama, drafter),
        lambda: ReDrafter(engine.target, drafter),
        lambda: engine.change_drafter(drafter),
    ]
    if wrong in ("a token twice", "an id past the end", "a negative id"):  # else no such file can be loaded
        drafter.save_pretrained(tmp_path)
        entries += [lambda: ReDrafter.from_pretrained(llama, tmp_path), lambda: engine.change_drafter(tmp_path)]
        entries += [lambda: open_drafter(tmp_path)]
    for enter in entries:
        with pytest.raises(CheckpointError, match=message):
            enter()
    same_as_model(engine, IDS, MASK, **GREEDY)


@ON_BOTH_CACHES
def test_siblings_with_one_token_change_no_text(llama, on):
    """Drafters that would propose them are refused; acceptance does not rely on that."""
    drafter = tiny_drafter(draft_vocab_size=VOCAB)
    engine = on(with_tree(llama, drafter, 2, 4))
    engine.pauses = False
    drafter.draft_ids.copy_(torch.arange(VOCAB) // 2 * 2)
    for seed in range(2):
        same_undrafted(engine, IDS, MASK, do_sample=True, temperature=0.3, seed=seed, max_new_tokens=20)


def test_the_defaults_come_from_the_drafters_config(llama):
    engine = ReDrafter.from_pretrained(llama, tiny_drafter(draft_beams=3, draft_len_per_beam=4), node_budget=99)
    assert (engine.proposer.beams, engine.proposer.depth, engine.proposer.nodes) == (3, 4, 13)
    assert ReDrafter.from_pretrained(llama, tiny_drafter()).proposer.nodes < 26  # a smaller budget on a CPU


@pytest.mark.parametrize(
    ("seed", "rows"),
    [
        *((seed, [40, 41]) for seed in (40, np.int64(40), torch.tensor(40))),
        *(
            (seeds, [7, 0])
            for seeds in ([7, 0], np.array([7, 0]), torch.tensor([7, 0]), [np.uint32(7), torch.tensor(0)])
        ),
        (2**63 - 1, [2**63 - 1]),
        ([2**63 - 1] * 2, [2**63 - 1] * 2),
    ],
    ids=str,
)
def test_rows_count_on_from_one_seed_or_have_their_own(seed, rows):
    assert row_seeds(seed, len(rows)) == rows


def test_a_seed_whose_followers_do_not_fit_is_refused_in_its_own_terms():
    with pytest.raises(ArgumentError, match=f"seed={2**63 - 1} is too large for 2 output rows.* at most {2**63 - 2},"):
        row_seeds(2**63 - 1, 2)


def test_without_a_seed_calls_and_rows_have_others_and_torchs_generator_repeats_them(engine):
    assert len({*row_seeds(None, 8), *row_seeds(None, 8)}) == 16
    written = []
    for seed in (5, 5, 6):
        set_seed(seed)
        written.append([engine.generate(IDS, MASK, do_sample=True, max_new_tokens=12) for _ in range(2)])
    assert all(map(torch.equal, written[0], written[1]))
    assert not torch.equal(*written[0])
    assert not torch.equal(written[0][0], written[2][0])


# Engines are loaded in one way.

# Besides what drafts, which each engine has names of its own for.
COMMON = ["model", "dtype", "device", "trust_remote_code", *EngineOptions.__dataclass_fields__, "model_kwargs"]


SIGNATURES = [inspect.signature(engine.from_pretrained) for engine in (ReDrafter, DraftTarget, PromptLookup)]


def test_engines_are_loaded_with_the_same_arguments():
    for signature in SIGNATURES:
        assert [name for name in signature.parameters if name in COMMON] == COMMON
        assert "options" not in signature.parameters
    for name in COMMON:
        parameters = [signature.parameters[name] for signature in SIGNATURES]
        assert len({(parameter.kind, parameter.default) for parameter in parameters}) == 1, name


def test_what_an_engine_may_use_is_checked_first():
    with pytest.raises(ArgumentError, match="max_seq_len must be an integer"):
        PromptLookup.from_pretrained("nowhere", max_seq_len="many")
