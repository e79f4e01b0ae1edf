"""Texts whose beginnings left the device and were found on the host: the tokens are those without any cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.recurrent import recurrent_model
from helpers.scheduling import (
    KINDS,
    make_sequence,
    run,
    scheduler,
)
from helpers.vocabularies import renumbered
from redrafter import ArgumentError, DraftTarget, Engine, ReDrafter
from redrafter.cache.host_blocks import HostBlocks
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.supported import Support
from redrafter.model.target import Target

SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.9, "seed": 3}}


def drafted_by_the_recurrent_drafter() -> ReDrafter:
    return with_tree(tiny_model("llama"), tiny_drafter(), 3, 3)


def drafted_with_context() -> ReDrafter:
    drafter = tiny_drafter(recurrence="gated", target_layers=(0, 1), context_window=12, context_head_dim=8)
    with torch.no_grad():
        drafter.context.out.weight.mul_(20)  # or nothing that is read would show
    return with_tree(tiny_model("llama"), drafter, 4, 3)


def drafted_by_a_model() -> DraftTarget:
    return DraftTarget(Target(tiny_model("llama")), Target(tiny_model("llama")), draft_len=3)


def drafted_by_another_vocabulary() -> DraftTarget:
    model = tiny_model("llama")
    draft_model, vocabulary = renumbered(model, 0.67)
    return DraftTarget(Target(model), Target(draft_model), draft_len=3, vocabulary=vocabulary)


ENGINES = {
    "drafter": drafted_by_the_recurrent_drafter,
    "context": drafted_with_context,
    "draft model": drafted_by_a_model,
    "another vocabulary": drafted_by_another_vocabulary,
}
MAKES = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
PROMPTS = [torch.randint(3, VOCAB, (1, 50), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
BLOCKS = 14  # of the device: fewer than the prompts have together, and enough for each in either vocabulary


def in_turns(engine: Engine, **arguments: object) -> list[Tensor]:
    """Write behind each prompt, twice, one after the other."""
    arguments = {"max_new_tokens": 12, "eos_token_id": None} | arguments
    return [engine.generate(prompt, **arguments) for prompt in (*PROMPTS, *PROMPTS)]


@MAKES
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_texts_are_those_of_plain_decoding(make: Callable[[], Engine], sampling: dict):
    expected = in_turns(make(), speculate=False, **sampling)
    engine = paged(make(), blocks=BLOCKS, host_blocks=60)
    found = in_turns(engine, **sampling)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for blocks in (engine.graphs.blocks, engine.graphs.draft_blocks):
        if blocks is engine.graphs.blocks or engine.draft_vocabulary is not None:
            assert blocks.onboarded >= 5 * 2
            assert blocks.num_holds == 0


@MAKES
def test_drafts_behind_what_was_copied_back_are_the_same(make: Callable[[], Engine]):
    engine = paged(make(), blocks=BLOCKS, host_blocks=60)
    accepted = [out.stats.accepted for out in in_turns(engine, do_sample=False, return_dict_in_generate=True)]
    assert engine.graphs.blocks.onboarded
    assert accepted[: len(PROMPTS)] == accepted[len(PROMPTS) :]
    assert sum(accepted)


def test_greedy_texts_are_those_of_the_model():
    engine = paged(drafted_by_the_recurrent_drafter(), blocks=BLOCKS, host_blocks=60)
    for prompt, text in zip((*PROMPTS, *PROMPTS), in_turns(engine, do_sample=False), strict=True):
        expected = engine.model.generate(prompt, max_new_tokens=12, eos_token_id=None, do_sample=False)
        assert torch.equal(text, expected)


@pytest.mark.parametrize("host_blocks", [2, 5])
def test_a_host_that_is_full_gives_up_texts_and_nothing_else(host_blocks: int):
    expected = in_turns(drafted_by_a_model(), speculate=False, do_sample=False)
    engine = paged(drafted_by_a_model(), blocks=BLOCKS, host_blocks=host_blocks)
    assert all(torch.equal(a, b) for a, b in zip(in_turns(engine, do_sample=False), expected, strict=True))
    assert engine.graphs.blocks.num_host_blocks == host_blocks - 1


def test_a_copy_that_fails_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch):
    engine = paged(drafted_by_the_recurrent_drafter(), blocks=BLOCKS, host_blocks=60)
    expected = in_turns(engine, do_sample=False)

    def fails(*arguments: object) -> None:
        raise KeyError("mine")

    with monkeypatch.context() as patch:
        patch.setattr(HostBlocks, "_copy_to_device", fails)
        with pytest.raises(KeyError):
            engine.generate(PROMPTS[0], max_new_tokens=20, eos_token_id=None, do_sample=False)
    blocks = engine.graphs.blocks
    assert (blocks.num_free_blocks, blocks.num_host_blocks) == (BLOCKS - 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(in_turns(engine, do_sample=False), expected, strict=True))


def test_tokens_found_on_the_host_count_as_reused():
    engine = drafted_by_a_model()
    served = scheduler(engine, blocks=10, host_blocks=40)
    sequences = [make_sequence(prompt[0].tolist(), 8, KINDS["greedy"]) for prompt in (*PROMPTS, PROMPTS[0])]
    for sequence in sequences:
        run(served, [sequence])
    assert [sequence.reused for sequence in sequences] == [0, 0, 0, 0, 0, 3 * BLOCK_SIZE]


@pytest.mark.parametrize(
    ("make", "copies"),
    [(drafted_by_a_model, (1, 0)), (drafted_by_another_vocabulary, (1, 1)), (drafted_with_context, (1, 0))],
    ids=["draft model", "another vocabulary", "context"],
)
def test_memory_of_the_host_is_taken_as_the_options_say(make: Callable[[], Engine], copies: tuple[int, int]):
    engine = make()
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.01, kv_host_cache_gib=0.01)
    for model in (engine.target, engine.draft_model or engine.target):
        model.varlen = Support()
    graphs = engine.make_graphs(rows=1)
    assert (int(graphs.host is not None), int(graphs.draft_host is not None)) == copies


def test_a_model_with_recurrent_states_takes_none():
    target = Target(recurrent_model("lfm2"))
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.01, kv_host_cache_gib=0.01)
    with pytest.warns(UserWarning, match="a prefix that has recurrent states is never reused"):
        graphs = Engine(target, PlainProposer(), options).make_graphs(rows=1)
    assert graphs.host is None


@pytest.mark.parametrize("gib", [-1.0, float("nan"), 1e9, float("inf"), True, "8", None])
def test_a_size_that_cannot_be_is_refused(gib: object):
    with pytest.raises(ArgumentError, match=r"--kv-host-cache-gib\) must be from 0 to the machine's memory, \d+ GiB"):
        EngineOptions(kv_host_cache_gib=gib)
