"""Routes that write nothing, and routes that are refused by name."""

from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
from transformers import AutoTokenizer

from redrafter import boxed_pair
from redrafter.version import __version__


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(boxed_pair())


def test_a_prompt_is_told_as_tokens_and_back(http, tokenizer):
    answer = http.post("/tokenize", json={"model": "boxed", "prompt": "The sea, é", "return_token_strs": True}).json()
    ids = tokenizer("The sea, é").input_ids
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] > 500
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}


TALK = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("added", [True, False])
def test_special_tokens_and_the_head_of_an_answer_are_added_where_it_is_asked_for(http, tokenizer, added):
    answer = http.post("/tokenize", json={"prompt": "The sea", "add_special_tokens": added}).json()
    assert answer["tokens"] == tokenizer("The sea", add_special_tokens=added).input_ids
    assert answer["token_strs"] is None
    answer = http.post("/tokenize", json={"messages": TALK, "add_generation_prompt": added}).json()
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=added)
    assert answer["tokens"] == tokenizer(text, add_special_tokens=False).input_ids
    if added:
        chat = http.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 1}).json()
        assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_a_prompt_longer_than_the_context_is_counted_and_one_without_end_refused(http):
    answer = http.post("/tokenize", json={"prompt": "sea " * 1500}).json()
    assert answer["count"] > answer["max_model_len"]
    assert http.post("/tokenize", json={"prompt": "sea " * 500_000}, timeout=300).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400),
        ("/tokenize", {"prompt": "a", "model": "another"}, 404),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1] * 100_000}, 400),
    ],
)
def test_what_is_wrong_is_said(path, body, status, http):
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_model_is_told_by_its_name_and_the_version(url, http):
    assert http.get("/version").json() == {"version": __version__}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    [model] = client.models.list().data
    assert client.models.retrieve("boxed") == model
    assert model.model_extra["max_model_len"] > 500
    with pytest.raises(openai.NotFoundError, match="'boxed' is") as refusal:
        client.models.retrieve("some/other")
    assert refusal.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/generate", "/api/chat", "/v1/embeddings", "/v1/batches/abc/cancel"])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_what_is_not_served_is_refused_with_what_is(path, method, http):
    answer = http.request(method, path, json={"input": "a"} if method == "POST" else None)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"].startswith(f"'{path}' is not served: use /v1/chat/completions, /v1/completions")
    assert error["code"] == "unsupported_endpoint"
