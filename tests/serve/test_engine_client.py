"""Between an engine and whoever listens to it, at the two ends of a connection in one process."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process.client import ServedSequence

pytest.importorskip("fastapi")

from helpers.engine_in_thread import GREEDY, EngineThread, asked, begun, written
from helpers.generation import noted
from helpers.processes import soon
from helpers.scheduling import alone, make_sequence, nothing_is_held, scheduler
from redrafter.errors import ArgumentError
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.engine_process import client as client_module
from redrafter.serve.engine_process import process
from redrafter.serve.engine_process import worker as worker_module
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.engine_process.messages import Submit


@pytest.fixture
def served(engine) -> Scheduler:
    return scheduler(engine, speculate=False)


@pytest.fixture
def client(served):
    made = begun(served)
    yield made
    made.stop()
    assert not made.alive
    assert served.idle
    assert not made.streams
    nothing_is_held(served)


@pytest.mark.parametrize("stop", [2, 5, 6, 8, 10, 11, 12])
def test_the_server_counts_drafts_before_a_stop_string_as_an_engine_does_that_ends_there(stop):
    def find_stop(new: Sequence[int]) -> int | None:
        return new.index(stop) if stop in new else None

    steps = [
        SequenceDelta([1]),  # drawn after the prompt
        SequenceDelta([2, 3, 4, 5, 6], drafted=7, copied=2, copies=3),  # four drafts, then a draw
        SequenceDelta([7, 8], drafted=7, copied=1, copies=3),
        SequenceDelta([9, 10, 11, 12], drafted=7, copied=3, copies=3),
    ]
    engines_own, cut_by_server = make_sequence([5], 40, GREEDY), make_sequence([5], 40, GREEDY)
    engines_own.stats, cut_by_server.stats = (Stats(accepted_by_depth=[0] * 4) for _ in range(2))
    engines_own.find_stop = find_stop
    served = ServedSequence([5], frozenset(), Stats(accepted_by_depth=[0] * 4), find_stop)
    written = []
    for step in steps:
        # A copy for each, as `append` cuts what it is given.
        mine, taken = engines_own.append(replace(step)), served.take(cut_by_server.append(replace(step)))
        assert (taken.tokens, taken.accepted, taken.copied, taken.finish) == (
            mine.tokens,
            mine.accepted,
            mine.copied,
            mine.finish,
        )
        written += taken.tokens
        if served.ended:
            break
    assert written == list(range(1, stop + 1))
    assert served.stats == engines_own.stats


async def test_a_slow_listener_gets_more_at_once(client, engine):
    heard = []
    async for sequence, deltas in asked(client, [[5, 6, 7], [8, 9]], 30):
        heard.append((sequence.prompt, [token for delta in deltas for token in delta.tokens]))
        while not sequence.ended:
            await asyncio.sleep(0.01)
    for prompt in ([5, 6, 7], [8, 9]):
        tokens = [token for read, tokens in heard if read == prompt for token in tokens]
        assert tokens == alone(engine, make_sequence(prompt, 30, GREEDY))
    assert len(heard) <= 4  # of 60 tokens, one a step


async def test_a_first_token_does_not_wait_for_a_step(client, served, monkeypatch):
    reported = threading.Event()
    step, waited = served.step, []
    monkeypatch.setattr(served, "step", lambda: (waited.append(reported.wait(60)), step()))
    async for _ in asked(client, [[5, 6, 7]], 8):
        reported.set()
    assert waited[0]


async def test_a_request_without_a_grammar_is_submitted_by_the_thread_that_receives_it(client, monkeypatch):
    threads = noted(monkeypatch, worker_module.Worker, "submit", lambda *_: threading.current_thread().name)
    async for _ in asked(client, [[5, 6, 7]], 4):
        pass
    assert threads == ["redrafter-receiver"]


async def test_a_message_about_many_sequences_calls_their_loop_once(client, monkeypatch):
    loop, calls, deltas = asyncio.get_running_loop(), [], []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (calls.append(1), call(*given)))
    async for _, new in asked(client, [[5, 6, 7 + n] for n in range(4)], 40):
        deltas += new
    assert len(calls) < len(deltas) / 2


async def test_a_drain_lets_what_was_begun_end_and_refuses_what_is_new(client):
    finishes = []
    async for _, new in asked(client, [[5 + n] for n in range(40)], 30):
        if client.alive:
            client.drain()
            assert not client.idle
        finishes += [delta.finish for delta in new if delta.finish is not None]
    with pytest.raises(Stopped):
        await anext(asked(client, [[5]], 3))
    assert finishes == ["length"] * 40
    assert client.idle


async def test_it_stops_where_nobody_reads(engine):
    client = begun(scheduler(engine, max_batch_size=2))
    deltas = [asked(client, [[5 + n], [7]], 80) for n in range(3)]
    await anext(deltas[0])
    waiting = [asyncio.ensure_future(anext(stream)) for stream in deltas[1:]]
    await asyncio.sleep(0)
    client.stop()
    for stream in waiting:  # nor does anybody wait for ever
        with pytest.raises(Stopped):
            await stream


async def test_a_round_that_never_ends_holds_nobody(engine, monkeypatch):
    monkeypatch.setattr(worker_module, "STOP_SECONDS", 0.2)
    served, go_on = scheduler(engine), threading.Event()
    monkeypatch.setattr(served, "step", lambda: go_on.wait(300))
    client = begun(served)
    deltas = asked(client, [[5, 6, 7]], 80)
    await anext(deltas)
    client.stop()
    with pytest.raises(Stopped):
        await anext(deltas)
    go_on.set()


class Panic(BaseException):
    """Stands for a panic of a library in Rust."""


@pytest.mark.parametrize("failure", [None, ZeroDivisionError, Panic])
def test_an_engine_says_by_its_exit_code_whether_it_failed(engine, monkeypatch, failure):
    def fail():
        raise failure

    served = scheduler(engine)
    if failure is not None:
        monkeypatch.setattr(served, "prefill", fail)
    thread = EngineThread(served, None)
    thread.channel.send(Submit([[5, 6, 7]], 8, GREEDY, numbers=(0,)))
    thread.channel.receive()  # what it wrote, or why it failed
    thread.channel.close()
    thread.end()
    assert thread.exit_code == (failure is not None)


@pytest.mark.parametrize(
    ("error", "prompt", "limits"),
    [
        (ArgumentError, [9999], {}),
        (ArgumentError, [], {}),
        (QueueFullError, [5], {"max_batch_size": 1, "max_queue_size": 1}),
    ],
)
async def test_a_refusal_is_the_schedulers_own_error(engine, error, prompt, limits):
    client = begun(scheduler(engine, **limits))
    async with aclosing(asked(client, [[5]] * 4, 80)) as running:
        await anext(running)
        with pytest.raises(error):
            await anext(asked(client, [prompt], 8))
    client.stop()


@pytest.fixture
def cancelled(served, monkeypatch) -> list:
    """The sequences that the engine is to cancel."""
    cancel, found = served.cancel, []
    monkeypatch.setattr(served, "cancel", lambda *sequences: (found.extend(sequences), cancel(*sequences)))
    return found


async def all_deltas(client, prompt: list[int], count: int, find_stop=None) -> list[SequenceDelta]:
    return [delta async for _, new in asked(client, [prompt], count, find_stop=find_stop) for delta in new]


async def test_a_stop_string_ends_a_text_here_and_in_the_engine(cancelled, client, engine):
    places = iter([None] * 6 + [0])
    deltas = await all_deltas(client, [5, 6, 7], 80, lambda tokens: next(places))
    assert [token for delta in deltas for token in delta.tokens] == alone(engine, make_sequence([5, 6, 7], 7, GREEDY))
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    assert client.idle
    assert soon(lambda: cancelled)


async def test_a_text_whose_stop_strings_cannot_be_looked_for_ends_alone(cancelled, client, engine):
    calls = iter(range(100))

    def fail(tokens: Sequence[int]) -> None:
        if next(calls) == 5:  # while the other text is written
            raise OverflowError("piece id is out of range")

    good, (*_, last) = await asyncio.gather(written(client, [8, 9], 60), all_deltas(client, [5, 6, 7], 60, fail))
    expected = alone(engine, make_sequence([8, 9], 60, GREEDY))
    assert good == await written(client, [8, 9], 60) == expected
    assert (last.finish, str(last.error)) == ("error", "the text cannot be read (OverflowError)")
    assert soon(lambda: cancelled)


async def test_a_text_whose_prompt_is_being_read_is_known_to_run(engine, monkeypatch):
    served, reported = scheduler(engine, max_num_tokens=16), []
    step = served.step
    monkeypatch.setattr(served, "step", lambda: (reported.append(soon(lambda: client.load.running == 1, 60)), step()))
    client = begun(served)
    await written(client, [3 + n % 60 for n in range(60)], 2)
    client.stop()
    assert reported[0]  # after the first piece, long before the first token


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_grammar_that_nobody_waits_for_any_more_is_given_up(engine, monkeypatch, seconds):
    class Endless:
        async def get(self, source: GrammarSource, client: str) -> None:
            await asyncio.sleep(100)

    monkeypatch.setattr(process, "Grammars", lambda tokenizer: Endless())
    client = begun(scheduler(engine))

    async def leave() -> None:
        deltas = asked(client, [[5], [6]], 8, grammar=GrammarSource.from_spec({"regex": "a"}))
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(seconds)
        assert not client.idle
        waiting.cancel()

    asyncio.run(leave())
    assert soon(lambda: client.idle)
    client.stop()


async def test_how_busy_the_engine_is_is_known(client, served):
    async with aclosing(asked(client, [[5]] * 40, 60)) as deltas:
        await anext(deltas)
        assert client.load.running == served.limits.max_batch_size
        assert client.load.waiting == 40 - client.load.running
        assert client.load.cache_usage > 0
    assert soon(lambda: (client.load.running, client.load.waiting, client.load.cache_usage) == (0, 0, 0))


async def test_changes_are_made_in_the_order_in_which_they_were_requested(client, monkeypatch):
    made = []

    def change(worker, message, done):
        time.sleep(0.1 if message.path else 0)  # as the files of an adapter take to be read
        made.append(message.name)
        done(None, ())

    monkeypatch.setattr(worker_module.Worker, "change", change)
    await asyncio.gather(client.change_adapters("loaded", "folder"), client.change_adapters("unloaded", None))
    await written(client, [5, 6], 4)
    assert made == ["loaded", "unloaded"]


async def test_those_who_leave_hold_nobody_up(client, engine):
    async def leave(number: int) -> None:
        prompts = [[5 + number, 6, 7 + n % 60] for n in range(300)]
        async with aclosing(asked(client, prompts, 8, client=f"{number}")) as deltas:
            await anext(deltas)

    *_, tokens = await asyncio.gather(
        *(leave(number) for number in range(4)), written(client, [8, 9], 20, client="stays")
    )
    assert tokens == alone(engine, make_sequence([8, 9], 20, GREEDY))


def sequence(stop: int | None) -> ServedSequence:
    return ServedSequence([5], frozenset(), Stats(accepted_by_depth=[0] * 4), lambda tokens: stop)


@pytest.mark.parametrize(("drafted", "draft_steps"), [(5, 1), (0, 1), (None, 0)])
def test_a_text_continues_until_its_last_delta_and_counts_its_steps(drafted, draft_steps):
    text, error = sequence(None), RuntimeError("no memory")
    text.take(SequenceDelta([7]))
    assert text.stats.steps == 0
    text.take(SequenceDelta([8], drafted=drafted))  # with drafts where others left it none too
    assert (text.stats.steps, text.stats.draft_steps) == (1, draft_steps)
    assert not text.ended
    text.take(SequenceDelta([], finish="cancelled"))
    assert text.ended
    delta = sequence(0).take(SequenceDelta([7, 8], finish="error", error=error))  # an error is no stop
    assert (delta.finish, delta.error) == ("error", error)


async def test_an_engine_whose_round_neither_ends_nor_computes_is_not_healthy(monkeypatch, served, client):
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(process, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(process, "COMPUTING", 0.1)  # the test itself computes in this process too
    step = served.step

    def stay_in_step() -> None:
        while computes and not freed.is_set():
            pass
        freed.wait(60)
        step()

    monkeypatch.setattr(served, "step", stay_in_step)
    for computes in (False, True):
        freed = threading.Event()
        text = asyncio.ensure_future(written(client, [5, 6], 4))
        await asyncio.sleep(0.6 * computes)
        assert await asyncio.to_thread(soon, lambda healthy=computes: client.healthy is healthy, 60)
        assert client.alive
        freed.set()
        assert len(await text) == 4
    await asyncio.sleep(0.6)  # with nothing to do
    assert await asyncio.to_thread(soon, lambda: client.healthy, 60)
