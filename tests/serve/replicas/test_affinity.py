"""Which replica a request goes to."""

import pytest

from redrafter.serve.replicas.router import rank_replicas, routing_key

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse." * 10}
IDLE = {"a": 0, "b": 0, "c": 0}


def chat(*messages: dict, **more: object) -> dict:
    return {"messages": list(messages), **more}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(SYSTEM, user("Hello")), chat(SYSTEM, user("Who are you?"))),
        (chat(user("Hello")), chat(user("Hello"), {"role": "assistant", "content": "Hi"}, user("And now?"))),
        (chat(user("Hello")), chat({"role": "user", "content": [{"type": "text", "text": "Hello"}]})),
        ({"prompt": "x" * 300 + "one"}, {"prompt": "x" * 300 + "other"}),
        ({"prompt": [5] * 70 + [1]}, {"prompt": [5] * 70 + [2]}),
        ({"prompt": "She said"}, {"prompt": ["She said", "He said"]}),
        ({"instructions": "Be brief.", "input": "one"}, {"instructions": "Be brief.", "input": "other"}),
    ],
    ids=["system prompt", "turns", "parts", "text", "tokens", "several", "instructions"],
)
def test_prompts_that_begin_alike_have_one_key(one, other):
    assert routing_key(None, one) == routing_key(None, other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "She said"}, {"prompt": "He said"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        (chat(user("Hello")), chat(user("Hello"), model="adapter")),
        (chat(user("Hello")), chat(user("Hello"), cache_salt="mine")),
    ],
    ids=["text", "tokens", "model", "salt"],
)
def test_prompts_that_share_no_cache_have_keys_of_their_own(one, other):
    assert routing_key(None, one) != routing_key(None, other)


def test_a_session_is_a_key_whatever_its_prompts():
    assert routing_key(b"s1", {"prompt": "a"}) == routing_key(b"s1", {"prompt": "b"}) != routing_key(b"s2", {})


def test_a_request_without_a_prompt_has_no_key():
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
