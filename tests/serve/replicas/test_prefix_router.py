"""The choice of a replica, as Ray asks for it."""

import asyncio
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from helpers.fake_ray import FakeRay
from redrafter.serve.replicas.exchange import HttpCall
from redrafter.serve.replicas.router import rank_replicas

MODULE = "redrafter.serve.replicas.prefix_router"


class _Id(SimpleNamespace):
    def __hash__(self) -> int:
        return hash(self.unique_id)


@pytest.fixture
def router(monkeypatch) -> Any:
    FakeRay().install(monkeypatch)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    router = importlib.import_module(MODULE).PrefixRouter()
    monkeypatch.delitem(sys.modules, MODULE)
    router.initialize_state(target=2)
    return router


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=_Id(unique_id=name))


def chosen(router: Any, key: str | None) -> list[list[str]]:
    request = SimpleNamespace(args=[HttpCall({}, b"", key)], routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(router.choose_replicas([replica("a"), replica("b")], request))
    return [[choice.replica_id.unique_id for choice in rank] for rank in ranks]


def test_a_key_has_an_order_of_replicas(router):
    assert chosen(router, "k") == [[name] for name in rank_replicas("k", {"a": 0, "b": 0}, 2)]


def test_ray_chooses_for_a_request_without_a_key(router):
    assert chosen(router, None) == [["a", "b"]]


def test_ray_chooses_where_no_request_of_a_client_waits(router):
    assert len(asyncio.run(router.choose_replicas([replica("a"), replica("b")], None))) == 1
    assert len(asyncio.run(router.choose_replicas([replica("a")], SimpleNamespace(args=["other"])))) == 1


def test_what_was_sent_counts_until_it_is_answered(router):
    [first], [second] = chosen(router, "k")
    for number in range(2):
        router.on_send_request(_Id(unique_id=first))
        assert chosen(router, "k")[0] == [first if number == 0 else second]
    router.on_request_completed(_Id(unique_id=first), "id")
    assert chosen(router, "k")[0] == [first]


def test_what_a_replica_tells_counts_too(router):
    [first], [second] = chosen(router, "k")
    router.told[_Id(unique_id=first)] = 9
    assert chosen(router, "k")[0] == [second]


def test_a_request_that_could_not_be_sent_is_not_counted(router):
    router.on_request_completed(_Id(unique_id="a"), "id")
    router.on_send_request(_Id(unique_id="a"))
    router.on_send_request(_Id(unique_id="a"))
    assert chosen(router, next(key for key in map(str, range(99)) if _first(key) == "a"))[0] == ["b"]


def _first(key: str) -> str:
    return rank_replicas(key, {"a": 0, "b": 0}, 2)[0]
