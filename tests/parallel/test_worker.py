"""The rounds of rank 0 of a server; the test simulates the other ranks."""

import threading
from types import SimpleNamespace

import psutil
import torch

from redrafter.serve.engine_process import worker as module
from redrafter.serve.engine_process.worker import SharedWorker


def worker_of(on_end, give_up=None, **ranks) -> SharedWorker:
    target = SimpleNamespace(ranks=SimpleNamespace(rank=0, **ranks), device=torch.device("cpu"))
    engine = SimpleNamespace(target=target)
    scheduler = SimpleNamespace(engine=engine, idle=True, asleep=False, later=())
    return SharedWorker(scheduler, lambda written: None, on_end, lambda *refused: None, give_up)


def test_a_stop_during_a_broadcast_ends_all_ranks_before_the_next_round():
    sent, ended = [], threading.Event()

    def from_first(value: tuple) -> tuple:
        sent.append(value)
        if len(sent) == 1:
            stopping = threading.Thread(target=worker.stop, daemon=True)
            stopping.start()
            stopping.join(0.2)  # it waits for this round
        assert len(sent) < 5, "the stop was lost"
        return value

    worker = worker_of(ended.set, from_first=from_first, describe_lost=lambda: None)
    worker.start()
    assert ended.wait(60)
    assert sent == [([], False), ([], True)]


def test_a_stopped_rank_that_another_ranks_watch_has_killed_is_given_up(monkeypatch):
    ended, reasons = threading.Event(), []

    def kill() -> None:
        raise psutil.NoSuchProcess(1)

    def from_first(value: tuple) -> tuple:
        assert ended.wait(60)  # as a collective that waits for the rank
        return value[0], True

    def describe_lost() -> str | None:
        return None if reasons else "rank 1 is lost"

    def give_up(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    monkeypatch.setattr(module, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOST_SECONDS", 0.0)
    lost = {"peers": {1: SimpleNamespace(kill=kill)}, "stopped": lambda: [1], "describe_lost": describe_lost}
    worker = worker_of(lambda: None, give_up, from_first=from_first, **lost)
    worker.start()
    assert ended.wait(300)
    worker.stop()
    assert reasons == ["rank 1 is lost"]
