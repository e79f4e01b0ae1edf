"""Which replica a request goes to, and the choice of it as Ray asks for it."""

import asyncio
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from redrafter.extensions.replicas.router import rank_replicas, routing_key

pytest.importorskip("fastapi")

from helpers.fake_ray import FakeRay
from redrafter.extensions.replicas.exchange import HttpCall

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse." * 10}
BILL = "x-anthropic-billing-header: cch="
BILLING = {"type": "text", "text": BILL + "a"}
BLOCKS = [{"type": "text", "text": "Be brief."}]
IDLE = {"a": 0, "b": 0, "c": 0}


HELLO = {"role": "user", "content": "Hello"}


def chat(*messages: dict, **more: object) -> dict:
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(
    ("alike", "one", "other"),
    [
        (True, chat(SYSTEM, HELLO), chat(SYSTEM, HELLO | {"content": "Who are you?"})),
        (True, chat(HELLO), chat(HELLO, {"role": "assistant", "content": "Hi"}, HELLO)),
        (True, chat(HELLO), chat(HELLO | {"content": [{"type": "text", "text": "Hello"}]})),
        (True, {"prompt": "x" * 300 + "one"}, {"prompt": "x" * 300 + "other"}),
        (True, {"prompt": [5] * 70 + [1]}, {"prompt": [5] * 70 + [2]}),
        (True, {"prompt": "She said"}, {"prompt": ["She said", "He said"]}),
        (True, {"instructions": "Be brief.", "input": "one"}, {"instructions": "Be brief.", "input": "other"}),
        (True, chat(HELLO, system="Be brief."), chat(HELLO | {"content": "Who?"}, system="Be brief.")),
        (
            True,
            chat(HELLO, system=BLOCKS),
            chat(HELLO | {"content": "Who?"}, system=[BILLING | {"text": BILL + "b"}, *BLOCKS]),
        ),
        (False, chat(HELLO, system=BLOCKS), chat(HELLO, system=[{"type": "text", "text": "Be long."}])),
        (False, {"prompt": "She said"}, {"prompt": "He said"}),
        (False, {"prompt": [1, 2]}, {"prompt": [1, 3]}),
        (False, chat(HELLO), chat(HELLO, model="adapter")),
        (False, chat(HELLO), chat(HELLO, cache_salt="mine")),
    ],
    ids=str,
)
def test_prompts_that_begin_alike_under_one_cache_have_one_key(alike, one, other):
    assert (routing_key(None, one) == routing_key(None, other)) == alike
    assert routing_key(None, one) is not None


def test_a_session_is_a_key_whatever_its_prompts_and_no_prompt_has_none():
    assert routing_key(b"s1", {"prompt": "a"}) == routing_key(b"s1", {"prompt": "b"}) != routing_key(b"s2", {})
    assert routing_key(None, {}) is None


@pytest.mark.parametrize("prompt", [7, {"a": 1}, [[[[1]]]], [None], [{"role": {}, "content": 3}]], ids=repr)
def test_what_is_no_prompt_is_left_to_the_replica(prompt):
    assert isinstance(routing_key(None, {"messages": prompt, "model": [[]]}), str)


def test_keys_are_spread_over_replicas():
    firsts = [rank_replicas(f"key {number}", IDLE, 8)[0] for number in range(300)]
    assert all(firsts.count(name) > 60 for name in IDLE)


def test_a_key_stays_where_it_is_when_another_replica_comes():
    for number in range(100):
        before, after = (rank_replicas(f"{number}", loads, 8)[0] for loads in (IDLE, IDLE | {"d": 0}))
        assert after in (before, "d")


def test_a_hot_key_spills_over_once_its_replica_is_full():
    first, second, _ = rank_replicas("hot", IDLE, 4)
    assert rank_replicas("hot", IDLE | {first: 3}, 4)[0] == first
    assert rank_replicas("hot", IDLE | {first: 4}, 4)[0] == second


def test_a_replica_may_have_a_quarter_more_than_the_mean_where_all_have_many():
    first = rank_replicas("hot", IDLE, 4)[0]
    busy = dict.fromkeys(IDLE, 20)
    assert rank_replicas("hot", busy | {first: 24}, 4)[0] == first
    assert rank_replicas("hot", busy | {first: 40}, 4)[-1] == first


MODULE = "redrafter.extensions.replicas.prefix_router"


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


def test_ray_chooses_for_a_request_without_a_key_and_where_none_of_a_client_waits(router):
    assert chosen(router, None) == [["a", "b"]]
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
