"""The `priority` of requests: who may send one, who is served first, and that who was put back writes the same."""

import json
import threading

import httpx
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from helpers.engine_in_thread import serving
from helpers.serving import PROMPTS, Address, offline, text_of
from redrafter.app.options import LoadOptions

ROUTES = {
    "/v1/completions": {"prompt": PROMPTS[1], "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def urgent_server():
    with serving(LoadOptions(device="cpu"), scheduling_policy="priority", max_batch_size=2) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_no_priority_but_0_is_taken_unless_the_operator_allows_it(route, program):
    for priority in (None, 0):
        assert program.post(route, ROUTES[route] | {"priority": priority}).status_code == 200
    for stream in (False, True):
        answer = program.post(route, ROUTES[route] | {"priority": -1, "stream": stream})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error.get("param") == ("priority" if route != "/v1/messages" else None)  # Anthropic's have none
        assert "Priority scheduling is not enabled" in error["message"]  # as vLLM says it
        assert "--scheduling-policy priority" in error["message"]


@pytest.fixture(scope="module")
def undisturbed(pair) -> list[str]:
    """What two texts after a prompt are alone."""
    seeds = (3, 4)
    return [text_of(pair, offline(pair, PROMPTS[0], 200, seed=seed, eos_token_id=None)) for seed in seeds]


@pytest.mark.parametrize("priority", [1.5, "1", True, 1 << 31])
def test_a_priority_is_an_integer(priority, urgent_server):
    answer = urgent_server.post("/v1/completions", ROUTES["/v1/completions"] | {"priority": priority})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


def told(server: Address, body: dict, begun: threading.Event, texts: dict[int, str]) -> None:
    """Ask for a stream, and collect the texts of its choices; `begun` is set when all of them have begun."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if len(texts) == body["n"]:
                begun.set()


@pytest.mark.variant
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/messages"])
def test_streams_of_several_texts_are_put_back_and_go_on_with_the_same_texts(route, urgent_server, undisturbed, pair):
    before = urgent_server.metrics()["vllm:num_preemptions_total"]
    body = {"prompt": PROMPTS[0], "max_tokens": 200, "n": 2, "seed": 3, "ignore_eos": True, "stream": True}
    begun, texts = threading.Event(), dict[int, str]()
    background = threading.Thread(target=told, args=(urgent_server, body | {"priority": 8}, begun, texts))
    background.start()
    assert begun.wait(60)
    answer = urgent_server.post(route, ROUTES[route] | {"priority": -2, "temperature": 0})
    assert answer.status_code == 200
    assert background.is_alive()
    background.join(120)
    assert urgent_server.metrics()["vllm:num_preemptions_total"] == before + 1
    assert [texts[0], texts[1]] == undisturbed
    if route == "/v1/completions":
        expected = offline(pair, PROMPTS[1], 4, do_sample=False)
        assert answer.json()["choices"][0]["text"] == text_of(pair, expected)
