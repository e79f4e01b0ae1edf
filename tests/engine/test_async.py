"""Calls of coroutines, which share a batch and write what `generate` writes."""

import asyncio
import gc
import threading
import time

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, pipeline

from helpers.adapters import saved
from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter, UnsupportedError, boxed_pair
from redrafter.engine.options import EngineOptions
from redrafter.engine.request import read_request
from redrafter.model.target import Target
from redrafter.scheduler.scheduler import Scheduler

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "seed": 4, "temperature": 0.8, "top_k": 9}


@pytest.fixture(scope="module")
def engine():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return with_tree(model, tiny_drafter(), 5, 5)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "redrafter-async"]


def rows_of_steps(engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each step."""
    rows, step = [], Scheduler.step

    def noted(self: Scheduler) -> None:
        rows.append(len(self.batch.rows))
        step(self)

    monkeypatch.setattr(Scheduler, "step", noted)
    return rows


def test_calls_at_once_share_steps_and_return_what_generate_and_the_model_return(engine, monkeypatch):
    steps = rows_of_steps(engine, monkeypatch)

    async def work():
        calls = [{"input_ids": IDS, "attention_mask": MASK, **GREEDY}]
        calls += [{"input_ids": IDS[:1], **SAMPLED | {"seed": seed}} for seed in range(3)]
        calls += [
            {"input_ids": IDS[:1], "num_speculative_tokens": 1, **GREEDY},
            {"input_ids": IDS[:1], "speculate": False, **GREEDY},
        ]
        return calls, await asyncio.gather(*(engine.agenerate(**call) for call in calls))

    calls, found = asyncio.run(work())
    assert max(steps) > len(IDS)
    for call, ids in zip(calls, found, strict=True):
        assert torch.equal(ids, engine.generate(**call | {"num_speculative_tokens": None, "speculate": False}))
    assert torch.equal(found[0], engine.model.generate(IDS, attention_mask=MASK, **GREEDY))


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_yields_the_tokens_as_they_are_written(engine, how):
    async def work():
        return [token async for token in engine.astream(IDS[:1], **how)]

    expected = engine.generate(IDS[:1], speculate=False, **how)[0, IDS.shape[1] :].tolist()
    assert asyncio.run(work()) == expected
    out = asyncio.run(engine.agenerate(IDS[:1], return_dict_in_generate=True, output_logits=True, **how))
    assert (out.stats.emitted, len(out.logits)) == (11, 12)


def test_a_call_that_is_cancelled_ends_its_sequences_and_the_others_continue(engine):
    async def work():
        other = asyncio.ensure_future(engine.agenerate(IDS[:1], max_new_tokens=40, do_sample=False))
        tokens = engine.astream(IDS[1:2], max_new_tokens=4000, do_sample=False)
        first = [await anext(tokens) for _ in range(3)]
        await tokens.aclose()
        late = asyncio.ensure_future(engine.agenerate(IDS[:1], max_new_tokens=4000, do_sample=False))
        await asyncio.sleep(0.05)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        return first, await other

    first, other = asyncio.run(work())
    assert first == engine.generate(IDS[1:2], max_new_tokens=3, do_sample=False)[0, -3:].tolist()
    assert torch.equal(other, engine.generate(IDS[:1], max_new_tokens=40, do_sample=False))
    for thread in threads():
        thread.join(timeout=60)
    assert not threads()
    assert engine.target.shared.calls == 0, "a call that has ended holds the weights"


@pytest.mark.parametrize("refused", [False, True])
def test_a_call_that_is_cancelled_twice_while_it_is_read_holds_nothing_and_logs_nothing(engine, monkeypatch, refused):
    reading, read, logged = threading.Event(), read_request, []

    def slow(*arguments, **prepared):
        reading.wait(timeout=60)
        if refused:
            raise ArgumentError("a mistake that nobody hears of")
        return read(*arguments, **prepared)

    monkeypatch.setattr("redrafter.engine.engine.read_request", slow)

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        call = asyncio.ensure_future(engine.agenerate(IDS[:1], **GREEDY))
        for _ in range(2):
            await asyncio.sleep(0.05)
            call.cancel()
        await asyncio.wait([call], timeout=0.2)
        reading.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        monkeypatch.undo()
        await engine.agenerate(IDS[:1], **GREEDY)  # which is read after it
        gc.collect()

    asyncio.run(work())
    for thread in threads():
        thread.join(timeout=60)
    assert engine.target.shared.calls == 0, "the weights are held for ever"
    assert not logged


def test_a_cancelled_call_takes_part_in_no_later_step(engine, monkeypatch):
    step, steps = Scheduler.step, []

    def slow(self: Scheduler) -> None:
        time.sleep(0.02)
        steps.append(len(self.batch.rows))
        step(self)

    monkeypatch.setattr(Scheduler, "step", slow)

    async def work():
        tokens = engine.astream(IDS[:1], max_new_tokens=1000, do_sample=False, speculate=False)
        await anext(tokens)
        await tokens.aclose()

    asyncio.run(work())
    for thread in threads():
        thread.join(timeout=60)
    assert sum(steps) < 500, "its rows are decoded to their ends"


LONG = {"input_ids": torch.arange(40)[None] * 7 % 83 + 4, **GREEDY}  # longer than a block, so its prefix is stored


def with_noise(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: x + 0.15 * torch.randn_like(x) for name, x in model.state_dict().items()}


def write_in_place(engine, weights):
    with torch.no_grad():
        for name, place in engine.model.state_dict().items():
            place.copy_(weights[name])


CHANGES = {
    "update_weights": lambda engine, weights: engine.update_weights(weights),
    "load_state_dict": lambda engine, weights: engine.model.load_state_dict(weights),
    "assigned": lambda engine, weights: engine.model.load_state_dict(weights, assign=True),
    "in place": write_in_place,
    "by another engine": lambda engine, weights: PromptLookup.from_pretrained(engine.model).update_weights(weights),
}


@pytest.mark.parametrize("change", CHANGES)
def test_calls_after_a_change_of_the_weights_write_what_the_new_model_writes(change):
    model = tiny_model("llama")
    engine = with_tree(model, tiny_drafter(), 3, 3)
    before = asyncio.run(engine.agenerate(**LONG))
    CHANGES[change](engine, with_noise(model))
    expected = model.generate(**LONG)
    assert not torch.equal(expected, before)
    for speculate in (True, False):
        assert torch.equal(asyncio.run(engine.agenerate(**LONG, speculate=speculate)), expected)
    assert torch.equal(engine.generate(**LONG), expected)


def test_a_call_that_runs_while_the_owner_writes_weights_stores_no_keys_of_the_old_ones():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = with_tree(model, tiny_drafter(), 3, 3)

    async def work():
        tokens = engine.astream(**LONG | {"max_new_tokens": 40})
        await anext(tokens)
        model.load_state_dict(with_noise(model))
        late = await engine.agenerate(IDS[:1], **GREEDY)
        async for _ in tokens:
            pass
        return late, await engine.agenerate(**LONG)

    late, after = asyncio.run(work())
    assert torch.equal(late, model.generate(IDS[:1], **GREEDY))
    assert torch.equal(after, model.generate(**LONG))


def test_sleep_releases_the_memory_of_coroutines_and_later_calls_write_the_same():
    model = tiny_model("llama")
    engine, other = with_tree(model, tiny_drafter(), 3, 3), PromptLookup.from_pretrained(model)
    before = [asyncio.run(each.agenerate(**LONG)) for each in (engine, other)]
    memories = list(engine.target.shared.memories)
    assert len(memories) == 2
    engine.sleep()
    assert not any(x.untyped_storage().nbytes() for memory in memories for x in memory.tensors)
    for each in (engine, other):
        assert each.asleep
        with pytest.raises(ArgumentError, match="asleep"):
            asyncio.run(each.agenerate(**LONG))
    other.wake()
    assert [torch.equal(asyncio.run(e.agenerate(**LONG)), ids) for e, ids in zip((engine, other), before, strict=True)]
    assert torch.equal(before[0], model.generate(**LONG))


@pytest.mark.parametrize("other", ["the engine", "an engine of the same model"])
def test_nothing_is_changed_while_a_coroutine_is_decoded(engine, other):
    changer = engine if other == "the engine" else PromptLookup.from_pretrained(engine.model)

    async def work():
        tokens = engine.astream(IDS[:1], max_new_tokens=30, do_sample=False)
        first = await anext(tokens)
        for change in (changer.sleep, lambda: changer.update_weights(engine.model.state_dict())):
            with pytest.raises(ArgumentError, match="is running on this model"):
                change()
        return [first, *[token async for token in tokens]]

    expected = engine.model.generate(IDS[:1], max_new_tokens=30, do_sample=False)[0, IDS.shape[1] :].tolist()
    assert asyncio.run(work()) == expected


def test_an_adapter_of_a_call_stays_until_it_ends_and_its_name_may_be_given_to_another(tmp_path):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tuned = [saved(tmp_path / name, seed=seed)[0] for seed, name in enumerate("ab", start=1)]
    engine = ReDrafter(Target(model), tiny_drafter(), options=EngineOptions(max_loras=1))
    calls = [LONG | {"max_new_tokens": 30, "adapter": "x"}] * 2

    async def work():
        engine.load_adapter("x", tmp_path / "a")
        tokens = engine.astream(**calls[0])
        texts = [[await anext(tokens)]]
        engine.unload_adapter("x")
        with pytest.raises(ArgumentError, match="max_loras"):
            engine.load_adapter("x", tmp_path / "b")
        texts[0] += [token async for token in tokens]
        engine.load_adapter("x", tmp_path / "b")
        return [*texts, [token async for token in engine.astream(**calls[1])]]

    for found, each in zip(asyncio.run(work()), tuned, strict=True):
        each.generation_config.eos_token_id = None
        assert found == each.generate(**LONG | {"max_new_tokens": 30})[0, LONG["input_ids"].shape[1] :].tolist()


def test_what_a_shared_batch_cannot_do_is_refused_with_what_to_type(engine):
    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    for arguments, error, says in (
        ({"streamer": object()}, UnsupportedError, "engine.astream"),
        ({"max_time": 5.0}, UnsupportedError, "asyncio.timeout"),
        ({"logits_processor": [Processor()]}, UnsupportedError, "asyncio.to_thread"),
        ({"num_beam": 2}, ArgumentError, "no argument 'num_beam'"),
        ({"num_speculative_tokens": 99}, ArgumentError, "got 99"),
        ({"num_speculative_tokens": 3, "speculate": False}, ArgumentError, "nothing drafts here, got 3"),
    ):
        with pytest.raises(error, match=says):
            asyncio.run(engine.agenerate(IDS[:1], **GREEDY, **arguments))

    async def two():
        return [token async for token in engine.astream(IDS[:2], MASK[:2], **GREEDY)]

    with pytest.raises(ArgumentError, match=r"astream\(\) writes one text, got 2 output rows"):
        asyncio.run(two())
    assert engine.target.shared.calls == 0


def test_adaptive_drafts_share_a_batch():
    model, unrelated = tiny_model("llama"), tiny_model("qwen2")
    engine = DraftTarget.from_pretrained(model, unrelated, draft_len=6, adaptive=True)
    sampled = {"max_new_tokens": 30, "do_sample": True, "seed": 5}

    async def work():
        calls = (GREEDY | {"max_new_tokens": 30}, sampled, sampled | {"temperature": 0.3})
        return await asyncio.gather(*(engine.agenerate(IDS[:1], **call) for call in calls)), calls

    for found, call in zip(*asyncio.run(work()), strict=True):
        assert found.equal(engine.generate(IDS[:1], speculate=False, **call))
    with pytest.raises(UnsupportedError, match=r"adaptive drafts exclude each other.*leave out adaptive"):
        DraftTarget.from_pretrained(model, unrelated, adaptive=True, acceptance="rejection")


def test_an_error_of_the_device_reaches_every_call_and_later_calls_are_decoded(engine, monkeypatch):
    def fail(self):
        raise RuntimeError("of the device")

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "step", fail)
        with pytest.raises(RuntimeError, match="of the device"):
            asyncio.run(engine.agenerate(IDS[:1], **GREEDY))
    assert torch.equal(asyncio.run(engine.agenerate(IDS[:1], **GREEDY)), engine.generate(IDS[:1], **GREEDY))


def test_a_pipeline_writes_with_the_engine():
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())
    how = {"max_new_tokens": 12, "do_sample": False}
    pipe = pipeline("text-generation", model=engine.model, tokenizer=tokenizer)
    with_engine = pipe("Once upon a time", custom_generate=engine.custom_generate(), **how)
    assert with_engine == pipe("Once upon a time", **how)
