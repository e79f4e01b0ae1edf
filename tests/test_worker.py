"""Between the engine's thread and whoever listens."""

import asyncio
import threading

from test_scheduler import alone, job, scheduler

from conftest import tiny_drafter, tiny_model, with_tree
from redrafter.serve.job import Settings
from redrafter.serve.worker import Worker


def test_a_slow_listener_gets_more_at_once():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = with_tree(model, tiny_drafter(), 4, 4)
    worker, settings = Worker(scheduler(engine, speculate=False)), Settings(temperature=0)
    worker.start()

    async def listen(pause: float) -> list[tuple[int, list[int]]]:
        found = []
        async for number, _, pieces in worker.pieces([[5, 6, 7], [8, 9]], 30, settings, lambda: None):
            found.append((number, [token for piece in pieces for token in piece.tokens]))
            await asyncio.sleep(pause)
        return found

    for pause in (0.0, 0.3):
        found = asyncio.run(listen(pause))
        for number, prompt in enumerate(([5, 6, 7], [8, 9])):
            written = [token for each, tokens in found if each == number for token in tokens]
            assert written == alone(engine, job(prompt, 30, settings))
    assert len(found) < 20  # of 60 tokens, one a step
    worker.stop()


def test_a_first_token_does_not_wait_for_a_step(monkeypatch):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    served = scheduler(with_tree(model, tiny_drafter(), 4, 4))
    worker, told = Worker(served), threading.Event()
    step, waited = served.step, []
    monkeypatch.setattr(served, "step", lambda: (waited.append(told.wait(5)), step()))

    async def listen() -> None:
        async for _ in worker.pieces([[5, 6, 7]], 8, Settings(temperature=0), lambda: None):
            told.set()

    worker.start()
    asyncio.run(listen())
    worker.stop()
    assert waited[0]
