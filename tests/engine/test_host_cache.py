"""Texts whose beginnings left the device and were found on the host: the tokens are those without any cache."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from helpers.features import make_engine
from helpers.models import VOCAB, paged
from helpers.recurrent import recurrent_model
from helpers.scheduling import KINDS, make_sequence, run, scheduler
from redrafter import Engine
from redrafter.cache.block_manager import BlockCopy
from redrafter.cache.host_blocks import HostBlocks
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.supported import Support

PROMPTS = [torch.randint(3, VOCAB, (1, 50), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
BLOCKS = 14  # of the device: fewer than the prompts have together, and enough for each in either vocabulary


def in_turns(engine: Engine, **arguments: object) -> list[Tensor]:
    """Write behind each prompt, twice, one after the other."""
    arguments = {"max_new_tokens": 12, "eos_token_id": None} | arguments
    return [engine.generate(prompt, **arguments) for prompt in (*PROMPTS, *PROMPTS)]


def on_host(name: str, host_blocks: int = 60) -> Engine:
    return paged(make_engine(name), blocks=BLOCKS, host_blocks=host_blocks)


@pytest.mark.parametrize("host_blocks", [2, 5])
def test_a_host_that_is_full_gives_up_texts_and_nothing_else(host_blocks: int):
    expected = in_turns(make_engine("draft model"), speculate=False, do_sample=False)
    engine = on_host("draft model", host_blocks)
    assert all(torch.equal(a, b) for a, b in zip(in_turns(engine, do_sample=False), expected, strict=True))
    assert engine.memory.blocks.num_host_blocks == host_blocks - 1


def test_a_copy_that_fails_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch):
    engine = on_host("drafter")
    expected, copy = in_turns(engine, do_sample=False), HostBlocks.copy

    def fails(host: HostBlocks, copies: list[BlockCopy]) -> None:
        if not all(each.to_host for each in copies):
            raise KeyError("mine")
        copy(host, copies)

    with monkeypatch.context() as patch:
        patch.setattr(HostBlocks, "copy", fails)
        with pytest.raises(KeyError):
            engine.generate(PROMPTS[0], max_new_tokens=20, eos_token_id=None, do_sample=False)
    blocks = engine.memory.blocks
    assert (blocks.num_free_blocks, blocks.num_host_blocks) == (BLOCKS - 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(in_turns(engine, do_sample=False), expected, strict=True))


def test_tokens_found_on_the_host_count_as_reused():
    served = scheduler(make_engine("draft model"), blocks=10, host_blocks=40)
    sequences = [make_sequence(prompt[0].tolist(), 8, KINDS["greedy"]) for prompt in (*PROMPTS, PROMPTS[0])]
    for sequence in sequences:
        run(served, [sequence])
    assert [sequence.reused for sequence in sequences] == [0, 0, 0, 0, 0, 3 * BLOCK_SIZE]


@pytest.mark.parametrize("name", ["draft model", "other vocabulary", "context"])
def test_memory_of_the_host_is_taken_as_the_options_say(name: str):
    engine = make_engine(name)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.01, kv_host_cache_gib=0.01)
    for model in (engine.target, engine.draft_model or engine.target):
        model.varlen = Support()
    memory = engine.make_memory(rows=1)
    assert memory.host is not None


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("lfm2", {}, None),
        ("lfm2", {"max_prefix_states": 0}, "it keeps no recurrent states of prefixes"),
        ("jamba", {}, "it keeps no recurrent states of prefixes"),
        ("mamba2", {}, "it has only recurrent states"),
    ],
)
def test_a_model_with_recurrent_states_takes_some_where_prefixes_are_found(model, options, words):
    options = {"kv_cache_free_gpu_memory_fraction": 0.01, "kv_host_cache_gib": 0.01} | options
    engine = make_engine("undrafted", recurrent_model(model), **options)
    with nullcontext() if words is None else pytest.warns(UserWarning, match=words):
        assert (engine.make_memory(rows=1).host is None) == (words is not None)
