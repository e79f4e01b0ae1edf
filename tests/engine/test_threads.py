"""Requests that share an engine, or a model, in several threads: each writes what it writes alone."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

import redrafter.engine.async_calls
import redrafter.engine.changes
import redrafter.model.self_test
import redrafter.model.target
from helpers.adapters import saved
from helpers.dflash import random_block_drafter
from helpers.drafters import random_drafter
from helpers.features import sized
from helpers.models import in_threads, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.recurrent import recurrent_model
from redrafter import CacheFullError, DraftTarget, Engine, PromptLookup, ReDrafter
from redrafter.model.target import Target
from redrafter.model.tree_forward import TreeForward
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.tree.sizes import TreeShape

THREADS, ROUNDS = 6, 2
WAYS = [
    {"do_sample": False},
    {"do_sample": False, "speculate": False},
    {"do_sample": True, "temperature": 0.8, "seed": 5},
    {"do_sample": True, "top_k": 20, "seed": 5, "speculate": False},
]


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


KINDS = {
    "drafter": lambda: with_tree(tiny_model("llama"), tiny_drafter(), 3, 3),
    "layers": lambda: with_tree(tiny_model("gemma2"), random_drafter(target_layers=(0, 2)), 3, 3),
    "draft model": lambda: DraftTarget.from_pretrained(
        tiny_model("llama"), tiny_model("gpt2", num_hidden_layers=1), draft_len=3, num_beams=2, adaptive=True
    ),
    "lookup": lambda: PromptLookup.from_pretrained(tiny_model("llama")),
    "states": lambda: PromptLookup.from_pretrained(recurrent_model("lfm2")),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_share_an_engine_write_what_each_writes_alone(kind):
    engine = KINDS[kind]()

    def work(index: int) -> torch.Tensor:
        ids, mask = uneven_batch(rows=1 + index % 3, longest=5 + index, seed=index)
        return engine.generate(ids, mask, max_new_tokens=12, **WAYS[index % len(WAYS)])

    alone = [work(index) for index in range(THREADS)]
    for _ in range(ROUNDS):
        for beside_others, expected in zip(in_threads(work, THREADS), alone, strict=True):
            assert torch.equal(beside_others, expected)
    hooked = [module for module in engine.model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert engine.model.get_output_embeddings() not in hooked


def llama4() -> PreTrainedModel:
    """Make a model whose queries are scaled by their positions in every second layer."""
    return tiny_model(
        "llama4_text", no_rope_layers=[1, 0, 1], floor_scale=4, attn_scale=1.0, attn_temperature_tuning=True
    )


ALONE = {
    "llama": lambda: tiny_model("llama"),
    "gemma3_text": lambda: tiny_model("gemma3_text"),
    "llama4": llama4,
    "gpt_neo": lambda: tiny_model("gpt_neo", attention_types=[[["global", "local", "global"], 1]]),
    "lfm2": lambda: recurrent_model("lfm2"),
}


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
@pytest.mark.parametrize("kind", ALONE)
def test_the_model_alone_computes_its_own_logits_while_another_thread_runs_a_forward(kind, on, monkeypatch):
    """At the beginning of each forward of the engine, which has set all that it sets on the model, another is run."""
    if kind == "gpt_neo" and on is paged:
        pytest.skip("its attention cannot be replaced")
    model = ALONE[kind]()
    engine = on(PromptLookup.from_pretrained(model))
    ids, mask = uneven_batch(rows=2)
    greedy = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    whole = model.generate(ids, **greedy)
    seen = torch.cat([mask, torch.ones(2, whole.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    with torch.no_grad():
        expected, found, call = model(whole, attention_mask=seen).logits, [], TreeForward._call_model  # noqa: SLF001

        def run(_: int) -> torch.Tensor:
            with torch.no_grad():
                return model(whole, attention_mask=seen).logits

        monkeypatch.setattr(
            TreeForward, "_call_model", lambda *args, **more: (found.extend(in_threads(run, 1)), call(*args, **more))[1]
        )
        assert torch.equal(engine.generate(ids, **greedy), whole)
    assert found
    for logits in found:
        torch.testing.assert_close(logits[seen > 0], expected[seen > 0], atol=1e-4, rtol=1e-4)


def test_coroutines_and_a_thread_share_an_engine_whose_drafter_calls_the_head_of_its_base():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    target = Target(model)
    engine = ReDrafter(target, random_block_drafter(**sized(model)), TreeShape(2, 3, 9))
    calls = [{"input_ids": prompts(1, 9 + index), "max_new_tokens": 8, "do_sample": False} for index in range(4)]

    async def work() -> list[torch.Tensor]:
        in_thread = [asyncio.to_thread(engine.generate, **call) for call in calls[:2]]
        return await asyncio.gather(*in_thread, *(engine.agenerate(**call) for call in calls[2:]))

    for _ in range(ROUNDS):
        for call, found in zip(calls, asyncio.run(work()), strict=True):
            assert torch.equal(found, model.generate(**call))


def test_first_requests_at_once_make_one_paged_memory(monkeypatch):
    made = []
    monkeypatch.setattr(PagedMemory, "on", lambda *_, **__: time.sleep(0.05) or made.append(object()) or made[-1])
    engine = KINDS["drafter"]()
    assert len(set(in_threads(lambda _: engine.shared_memory, 4))) == len(made) == 1


class Gate:
    """A streamer that holds its call, and so the blocks of its rows, from the first token on until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def put_step(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(300)

    def end(self) -> None:
        pass


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once a call waits for blocks of others."""
    event, wait = threading.Event(), SequenceBlocks.wait
    monkeypatch.setattr(SequenceBlocks, "wait", lambda blocks: (event.set(), wait(blocks)))
    return event


def prompts(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def test_a_call_waits_for_blocks_that_a_call_of_another_thread_holds(waiting):
    greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    batches, gate = [prompts(12, 9), prompts(2, 11)], Gate()
    expected = [KINDS["drafter"]().generate(batch, **greedy) for batch in batches]
    engine = paged(KINDS["drafter"](), blocks=1 + 8 * 4)

    def work(index: int) -> torch.Tensor:
        if index == 2:  # opens the gate once the second call waits
            assert waiting.wait(300)
            gate.opened.set()
            return torch.empty(0)
        assert index == 0 or gate.reached.wait(300)
        return engine.generate(batches[index], streamer=None if index else gate, **greedy)

    assert all(map(torch.equal, in_threads(work, 3), expected))
    assert engine.memory.blocks.num_free_blocks == engine.memory.blocks.num_blocks
    assert not engine.memory.turns


@pytest.mark.parametrize("kind", ["drafter", "draft model"])
def test_calls_that_fill_the_cache_together_all_come_to_their_ends(kind):
    engine = paged(KINDS[kind](), blocks=8)

    def work(index: int) -> torch.Tensor:
        return engine.generate(prompts(3, 5 + index), max_new_tokens=12, **WAYS[index % len(WAYS)])

    alone = [work(index) for index in range(THREADS)]
    for beside_others, expected in zip(in_threads(work, THREADS), alone, strict=True):
        assert torch.equal(beside_others, expected)


def beside_one_that_holds_blocks(engine: Engine, new: int, then: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Do something while a call of another thread stands still after its first token; return what both gave."""
    gate = Gate()

    def work(index: int) -> torch.Tensor:
        if not index:
            return engine.generate(prompts(1, 9), max_new_tokens=new, do_sample=False, streamer=gate)
        assert gate.reached.wait(300)
        out = then()
        gate.opened.set()
        return out

    return in_threads(work, 2)


def test_what_never_fits_is_refused_though_others_hold_blocks(waiting):
    engine = paged(KINDS["drafter"](), blocks=5)

    def refused() -> torch.Tensor:
        with pytest.raises(CacheFullError):
            engine.generate(prompts(1, 30), max_new_tokens=40, do_sample=False)
        return torch.empty(0)

    assert beside_one_that_holds_blocks(engine, 4, refused)[0].shape[1] > 9
    assert not waiting.is_set()


def test_a_call_whose_deadline_passes_while_it_waits_returns_its_prompts(waiting):
    engine = paged(KINDS["drafter"](), blocks=5)
    late = {"max_new_tokens": 20, "do_sample": False, "max_time": 0.2}
    out = beside_one_that_holds_blocks(engine, 20, lambda: engine.generate(prompts(1, 9), **late))[1]
    assert out.dtype == torch.long
    assert torch.equal(out, prompts(1, 9))
    assert waiting.is_set()
    assert not engine.memory.turns


def test_all_that_runs_on_a_gpu_finds_it_current(monkeypatch, tmp_path):
    current, found, forward = threading.local(), list[bool](), torch.nn.Embedding.forward

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        before, current.inside = getattr(current, "inside", False), True
        yield
        current.inside = before

    def noted(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        found.append(getattr(current, "inside", False))
        return forward(self, ids)

    for module in (
        redrafter.model.target,
        redrafter.model.self_test,
        redrafter.engine.changes,
        redrafter.engine.async_calls,
    ):
        monkeypatch.setattr(module, "on_device", on_device)
    model = tiny_model("llama")
    _, adapter = saved(tmp_path)
    monkeypatch.setattr(torch.nn.Embedding, "forward", noted)
    engine = with_tree(model, tiny_drafter(), 3, 3)
    engine.generate(uneven_batch()[0], max_new_tokens=4)
    engine.load_adapter("it", adapter)
    asyncio.run(engine.agenerate(uneven_batch()[0], max_new_tokens=4, adapter="it"))
    assert found
    assert all(found)
