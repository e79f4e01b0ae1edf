"""Between the engine's thread and whoever listens."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import alone, make_sequence, nothing_is_held, scheduler
from redrafter import Engine
from redrafter.scheduler.sequence import SamplingParams
from redrafter.serve import worker as worker_module
from redrafter.serve.worker import SlowConsumerError, Stopped, Worker

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return with_tree(model, tiny_drafter(), 4, 4)


@pytest.fixture
def worker(engine):
    made = Worker(scheduler(engine, speculate=False))
    made.start()
    yield made
    made.stop()
    assert not made.alive
    assert made.scheduler.idle
    assert not made.streams
    nothing_is_held(made.scheduler)


def test_a_slow_listener_gets_more_at_once(engine):
    worker, params = Worker(scheduler(engine, speculate=False)), SamplingParams(temperature=0)
    worker.start()

    async def listen(pause: float) -> list[tuple[int, list[int]]]:
        heard = []
        async for number, _, deltas in worker.deltas([[5, 6, 7], [8, 9]], 30, params, lambda: None):
            heard.append((number, [token for delta in deltas for token in delta.tokens]))
            await asyncio.sleep(pause)
        return heard

    for pause in (0.0, 0.3):
        heard = asyncio.run(listen(pause))
        for number, prompt in enumerate(([5, 6, 7], [8, 9])):
            written = [token for sequence, tokens in heard if sequence == number for token in tokens]
            assert written == alone(engine, make_sequence(prompt, 30, params))
    assert len(heard) < 20  # of 60 tokens, one a step
    worker.stop()


def test_a_first_token_does_not_wait_for_a_step(engine, monkeypatch):
    served = scheduler(engine)
    worker, told = Worker(served), threading.Event()
    step, waited = served.step, []
    monkeypatch.setattr(served, "step", lambda: (waited.append(told.wait(5)), step()))

    async def listen() -> None:
        async for _ in worker.deltas([[5, 6, 7]], 8, SamplingParams(temperature=0), lambda: None):
            told.set()

    worker.start()
    asyncio.run(listen())
    worker.stop()
    assert waited[0]


def test_who_takes_nothing_is_dropped_and_nobody_else(worker, engine, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_PENDING_TOKENS", 20)
    monkeypatch.setattr(worker_module, "MAX_BEHIND_SECONDS", 0.0)

    async def slow() -> None:
        async with aclosing(worker.deltas([[5, 6, 7], [9]], 60, GREEDY, lambda: None)) as deltas:
            _, taken, _ = await anext(deltas)
            while not taken.ended:
                await asyncio.sleep(0.01)
            assert taken.cancelled
            assert taken.written < 60
            with pytest.raises(SlowConsumerError, match="tokens were written that nobody took"):
                async for _ in deltas:  # what it was given before
                    pass

    async def quick() -> list[int]:
        return [
            token
            async for _, _, deltas in worker.deltas([[8, 9]], 60, GREEDY, lambda: None)
            for delta in deltas
            for token in delta.tokens
        ]

    async def both() -> list[int]:
        _, tokens = await asyncio.gather(slow(), quick())
        return tokens

    assert asyncio.run(both()) == alone(engine, make_sequence([8, 9], 60, GREEDY))


def test_alternatives_count_among_what_is_pending(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_PENDING_TOKENS", 100)
    monkeypatch.setattr(worker_module, "MAX_BEHIND_SECONDS", 0.0)

    async def listen(logprobs: int | None) -> None:
        params = SamplingParams(temperature=0, logprobs=logprobs)
        async with aclosing(worker.deltas([[5, 6, 7]], 60, params, lambda: None)) as deltas:
            _, taken, _ = await anext(deltas)
            while not taken.ended:
                await asyncio.sleep(0.01)
            await anext(deltas)

    asyncio.run(listen(None))
    with pytest.raises(SlowConsumerError):
        asyncio.run(listen(10))


def test_who_turns_round_for_a_moment_is_not_dropped(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_PENDING_TOKENS", 5)

    async def listen() -> int:
        async with aclosing(worker.deltas([[5, 6, 7]], 60, GREEDY, lambda: None)) as deltas:
            _, taken, _ = await anext(deltas)
            while not taken.ended:
                await asyncio.sleep(0.01)
            _, taken, pending = await anext(deltas)
            return sum(len(delta.tokens) for delta in pending)

    assert asyncio.run(listen()) > 50


def test_a_loop_that_stands_still_is_called_once(worker, monkeypatch):
    async def listen() -> int:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (calls.append(1), call(*given)))
        async with aclosing(worker.deltas([[5, 6, 7]], 40, GREEDY, lambda: None)) as deltas:
            _, taken, _ = await anext(deltas)
            while not taken.ended:
                time.sleep(0.01)  # nothing else happens in this loop meanwhile
        return len(calls)

    assert asyncio.run(listen()) <= 3


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_after_a_drain_what_is_left_is_cancelled(seconds, worker):
    async def listen() -> list[str | None]:
        deltas = worker.deltas([[5 + n] for n in range(40)], 80, GREEDY, lambda: None)
        finishes = []
        async for _, _, new in deltas:
            if worker.alive:
                worker.drain(seconds)
            finishes += [delta.finish for delta in new if delta.finish is not None]
        with pytest.raises(Stopped):
            await anext(worker.deltas([[5]], 3, GREEDY, lambda: None))
        return finishes

    finishes = asyncio.run(listen())
    assert len(finishes) == 40
    assert "cancelled" in finishes


def test_to_stop_takes_no_longer_where_nobody_reads(engine):
    worker = Worker(scheduler(engine, max_batch_size=2))
    worker.start()

    async def leave_unread() -> None:
        deltas = [worker.deltas([[5 + n], [7]], 80, GREEDY, lambda: None) for n in range(3)]
        first = await anext(deltas[0])
        waiting = [asyncio.ensure_future(anext(stream)) for stream in deltas[1:]]
        await asyncio.sleep(0)
        began = time.perf_counter()
        worker.stop()
        assert time.perf_counter() - began < 5
        assert first[1].ended
        for stream in waiting:  # nor does anybody wait for ever
            number, _, last = await stream
            assert number in (0, 1)
            assert last
        assert [delta.finish for delta in last][-1] is not None

    asyncio.run(leave_unread())
    worker.stop()


def test_a_round_that_never_ends_holds_nobody(engine, monkeypatch):
    monkeypatch.setattr(worker_module, "STOP_SECONDS", 0.2)
    worker, go_on = Worker(scheduler(engine)), threading.Event()
    monkeypatch.setattr(worker.scheduler, "step", lambda: go_on.wait(20))
    worker.start()

    async def listen() -> None:
        deltas = worker.deltas([[5, 6, 7]], 80, GREEDY, lambda: None)
        await anext(deltas)
        worker.stop()
        with pytest.raises(Stopped):
            await anext(deltas)

    asyncio.run(listen())
    go_on.set()


def test_an_engine_that_fails_leaves_nobody_waiting(engine, monkeypatch):
    worker = Worker(scheduler(engine))
    monkeypatch.setattr(worker.scheduler, "step", lambda: 1 / 0)
    worker.start()

    async def listen() -> None:
        with pytest.raises(Stopped):
            async for _ in worker.deltas([[5, 6, 7]], 80, GREEDY, lambda: None):
                pass

    asyncio.run(listen())
    assert not worker.alive


def test_those_who_leave_hold_nobody_up(worker, engine):
    async def leave(client: int) -> None:
        prompts = [[5 + client, 6, 7 + n % 60] for n in range(300)]
        async with aclosing(worker.deltas(prompts, 8, GREEDY, lambda: None, f"{client}")) as deltas:
            await anext(deltas)

    async def stay() -> list[int]:
        stream = worker.deltas([[8, 9]], 20, GREEDY, lambda: None, "stays")
        return [token async for _, _, deltas in stream for delta in deltas for token in delta.tokens]

    async def all_of_them() -> list[int]:
        *_, tokens = await asyncio.gather(*(leave(client) for client in range(4)), stay())
        return tokens

    assert asyncio.run(all_of_them()) == alone(engine, make_sequence([8, 9], 20, GREEDY))
