"""Texts of thousands of tokens: what is drafted is what undrafted decoding and `model.generate` write."""

import pytest
import torch

from helpers.context_drafter import context_drafter
from helpers.generation import noted, same_as_model, same_undrafted
from helpers.models import DRAFTER_ALONE, VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead, make_sequence, run, scheduler, until_stepping
from redrafter import ReDrafter
from redrafter.cache.block_manager import BlockManager
from redrafter.cache.options import CacheOptions
from redrafter.drafting.context_attention import ContextWindow
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler import row_caches
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.prefill import Prefiller
from redrafter.scheduler.running_batch import RunningBatch

CONTEXT, PROMPT, NEW = 65536, 1400, 20
GREEDY = SamplingParams(temperature=0)
ON_BOTH_CACHES = pytest.mark.parametrize(
    "on", [lambda engine: engine, lambda engine: paged(engine, 400)], ids=["dense", "paged"]
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=CONTEXT, eos_token_id=None)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(5))


@ON_BOTH_CACHES
@pytest.mark.parametrize("window", [64, 1024])
def test_drafts_read_their_window_of_a_long_text_and_no_more(model, prompt, on, window, monkeypatch):
    engine = on(with_tree(model, context_drafter(context_window=window), 4, 3))
    found = noted(monkeypatch, ContextWindow, "read_last")
    same_as_model(engine, prompt, max_new_tokens=NEW)
    assert {read.keys.shape[-1] for read in found} == {read.values.shape[2] for read in found} == {1 + window}
    assert all(not read.bias.any() for read in found)  # all of the window is text


@ON_BOTH_CACHES
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_drafts_that_a_long_text_never_takes_are_left_out_of_most_steps(model, prompt, on, how, monkeypatch):
    monkeypatch.setattr(ReDrafter, "pauses", True)
    drafter = context_drafter(context_window=512, draft_vocab_size=40)
    engine = on(ReDrafter(Target(model), drafter, options=DRAFTER_ALONE))
    unknown = {"suppress_tokens": drafter.draft_ids.tolist()}  # to the drafter is all that the text may say
    taken = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, *_: step.proposer.depth)
    same_undrafted(engine, prompt, max_new_tokens=100, **unknown, **how)
    with_drafts = taken[: len(taken) - 99]  # those of the call that may draft
    assert len(with_drafts) == 99
    assert 0 < sum(map(bool, with_drafts)) < 20


def test_a_step_copies_new_blocks_to_the_device_and_no_others(model, prompt, monkeypatch):
    engine = paged(with_tree(model, tiny_drafter(), 4, 3), 400)
    served = scheduler(engine, blocks=400)
    until_stepping(served, make_sequence(prompt[0].tolist(), NEW, GREEDY))
    copied = noted(monkeypatch, row_caches, "to_device", lambda _, values, *how: values)
    run(served, [])
    numbers = [len(of_block) for blocks in copied for of_block in blocks]  # its row, its place and its id
    assert numbers == [3] * len(copied)
    assert copied


def test_only_the_last_chunk_of_a_prompt_brings_all_its_tokens(model, prompt, monkeypatch):
    served = scheduler(paged(with_tree(model, tiny_drafter(), 4, 3), 400), blocks=400, max_num_tokens=600)
    read = noted(monkeypatch, Target, "prefill", lambda _, target, prompts: prompts.tokens)
    run(served, [make_sequence(prompt[0].tolist(), 2, GREEDY)])
    most = 600 + 1  # of a chunk, and the token before it, from which a draft model with recurrent states reads on
    assert [int((tokens != 0).sum()) <= most for tokens in read] == [True] * (len(read) - 1) + [False]


def test_the_prefix_of_a_text_that_waits_for_blocks_is_not_sought_in_every_round(model, prompt, monkeypatch):
    served = scheduler(paged(with_tree(model, tiny_drafter(), 4, 3), 120), blocks=120)
    sought = noted(monkeypatch, BlockManager, "_find")
    sequences = [make_sequence([3 + first, *prompt[0].tolist()], 60, GREEDY) for first in range(2)]
    served.submit(*sequences)
    rounds = 0
    while not sequences[0].ended:
        served.round()
        rounds += 1
    assert len(sought) < rounds / 2
    run(served, [])
    assert sequences[1].sink.tokens


def test_a_single_row_has_blocks_for_the_longest_text(model):
    memory = PagedMemory.on(
        Target(model), options=CacheOptions(kv_cache_free_gpu_memory_fraction=0.5), max_seq_len=None, rows=1
    )
    assert (memory.store.num_blocks - 1) * BLOCK_SIZE >= CONTEXT


def test_prompts_read_beside_rows_find_no_caches_before_they_are_complete(model, prompt, monkeypatch):
    launch_ahead(monkeypatch)
    finished = noted(monkeypatch, Prefiller, "finish_mixed")
    served = scheduler(paged(with_tree(model, tiny_drafter(), 4, 3), 400), blocks=400)
    until_stepping(served, make_sequence([5, 6, 7], 80, GREEDY))
    finished.clear()
    served.submit(make_sequence(prompt[0].tolist(), 4, GREEDY))
    run(served, [])
    assert [rows is not None for rows in finished] == [False] * (len(finished) - 1) + [True]
