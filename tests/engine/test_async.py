"""Calls of coroutines, which share a batch and write what `generate` writes."""

import asyncio
import threading

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, pipeline

from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DraftTarget, ReDrafter, UnsupportedError, boxed_pair
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


def test_statistics_come_with_the_output(engine):
    out = asyncio.run(engine.agenerate(IDS[:1], return_dict_in_generate=True, output_logits=True, **GREEDY))
    assert out.stats.emitted == 11
    assert len(out.logits) == 12


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
    assert engine._calls == 0, "a call that has ended holds the weights"  # noqa: SLF001


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
    assert engine._calls == 0  # noqa: SLF001


def test_an_engine_whose_rows_draft_as_their_own_drafts_suggest_shares_no_batch():
    model = tiny_model("llama")
    engine = DraftTarget.from_pretrained(model, model, adaptive=True)
    with pytest.raises(UnsupportedError, match=r"adaptive drafts .*leave out --adaptive"):
        asyncio.run(engine.agenerate(IDS[:1], **GREEDY))


def test_an_error_of_the_device_reaches_every_call_and_later_calls_are_decoded(engine, monkeypatch):
    def fail(self):
        raise RuntimeError("of the device")

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "step", fail)
        with pytest.raises(RuntimeError, match="of the device"):
            asyncio.run(engine.agenerate(IDS[:1], **GREEDY))
    assert torch.equal(asyncio.run(engine.agenerate(IDS[:1], **GREEDY)), engine.generate(IDS[:1], **GREEDY))


def test_a_pipeline_writes_with_the_engine_and_one_that_is_given_the_engine_says_how():
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())
    how = {"max_new_tokens": 12, "do_sample": False}
    pipe = pipeline("text-generation", model=engine.model, tokenizer=tokenizer)
    with_engine = pipe("Once upon a time", custom_generate=engine.custom_generate(), **how)
    assert with_engine == pipe("Once upon a time", **how)
    with pytest.raises(AttributeError, match=r"give engine\.model and call it with custom_generate=engine"):
        pipeline("text-generation", model=engine, tokenizer=tokenizer)
