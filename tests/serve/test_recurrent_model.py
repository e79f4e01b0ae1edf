"""A server whose model keeps recurrent states: clients at once, each with the text that it would have alone."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from helpers.engine_in_thread import client_of, written
from helpers.recurrent import recurrent_model
from helpers.scheduling import alone, make_sequence, nothing_is_held
from redrafter import DraftTarget
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.limits import Limits
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.engine_process.engine import warm_up

SETTINGS = [SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=5)]


def test_clients_at_once_get_what_each_would_alone():
    target = Target(recurrent_model("lfm2"))
    engine = DraftTarget(target, Target(recurrent_model("lfm2")), draft_len=3)
    served = Scheduler(engine, engine.make_graphs(4), Limits(max_batch_size=4, max_seq_len=200))
    assert served.graphs.store.rows == 4
    warm_up(served)
    client = client_of(served)
    client.start()

    async def listen_all() -> list[list[int]]:
        prompts = [[5 + number, 6, 7] * (1 + number) for number in range(7)]
        return await asyncio.gather(*(written(client, p, 12, SETTINGS[n % 2]) for n, p in enumerate(prompts)))

    try:
        texts = asyncio.run(listen_all())
    finally:
        client.stop()
    for number, text in enumerate(texts):
        sequence = make_sequence([5 + number, 6, 7] * (1 + number), 12, SETTINGS[number % 2])
        assert text == alone(engine, sequence)
    nothing_is_held(served)
