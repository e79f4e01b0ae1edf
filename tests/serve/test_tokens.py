"""Routes that write nothing, and routes that are refused by name."""

from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
from transformers import AutoTokenizer

from helpers.serving import Program
from redrafter import boxed_pair
from redrafter.serve.protocol.response_models import ErrorAnswer
from redrafter.version import __version__


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    found = Program("--max-batch-size", "8", "--api-key", "secret")
    yield found
    assert found.end() == 0


@pytest.fixture(scope="module")
def http(program) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=program.url, headers={"Authorization": "Bearer secret"}) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(boxed_pair())


def test_a_prompt_is_told_as_tokens_and_back(http, tokenizer):
    found = http.post("/tokenize", json={"model": "boxed", "prompt": "The sea, é", "return_token_strs": True}).json()
    ids = tokenizer("The sea, é").input_ids
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["max_model_len"] > 500
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    for special in (True, False):
        told = http.post("/tokenize", json={"prompt": "The sea", "add_special_tokens": special}).json()
        assert told["tokens"] == tokenizer("The sea", add_special_tokens=special).input_ids
        assert told["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}


def test_messages_are_told_as_the_template_writes_them(http, tokenizer):
    talk = [{"role": "user", "content": "Hello"}]
    for begun in (True, False):
        found = http.post("/tokenize", json={"messages": talk, "add_generation_prompt": begun}).json()
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=begun)
        assert found["tokens"] == tokenizer(text, add_special_tokens=False).input_ids
    chat = http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 1}).json()
    told = http.post("/tokenize", json={"messages": talk}).json()
    assert told["count"] == chat["usage"]["prompt_tokens"]


def test_a_prompt_longer_than_the_context_is_counted_and_one_without_end_refused(http):
    found = http.post("/tokenize", json={"prompt": "sea " * 1500}).json()
    assert found["count"] > found["max_model_len"]
    assert http.post("/tokenize", json={"prompt": "sea " * 500_000}, timeout=20).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 422),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 422),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400),
        ("/tokenize", {"prompt": "a", "model": "another"}, 404),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 422),
        ("/detokenize", {"tokens": [1] * 100_000}, 400),
    ],
)
def test_what_is_wrong_is_said(path, body, status, http):
    answer = http.post(path, json=body)
    assert answer.status_code == status
    ErrorAnswer.model_validate(answer.json())


def test_the_key_is_asked_for_where_work_is_done(program):
    for path in ("/tokenize", "/detokenize", "/v1/responses", "/v1/embeddings"):
        assert httpx.post(f"{program.url}{path}", json={"prompt": "a", "tokens": []}).status_code == 401
    assert httpx.get(f"{program.url}/version").json() == {"version": __version__}


def test_a_model_is_told_by_its_name(program, http):
    client = openai.OpenAI(base_url=f"{program.url}/v1", api_key="secret", max_retries=0)
    assert client.models.retrieve("boxed") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'boxed' is") as found:
        client.models.retrieve("some/other")
    assert found.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("embeddings", "/v1/chat/completions"),
        ("messages", "Anthropic"),
        ("messages/count_tokens", "Anthropic"),
        ("audio/speech", "audio"),
        ("images/generations", "images"),
        ("moderations", "moderations"),
        ("files", "nothing is stored"),
        ("batches/abc/cancel", "at once"),
        ("fine_tuning/jobs", "redrafter train"),
    ],
)
def test_what_is_not_served_is_refused_by_name(path, says, http):
    for answer in (http.post(f"/v1/{path}", json={"input": "a"}), http.get(f"/v1/{path}")):
        assert answer.status_code == 404
        error = ErrorAnswer.model_validate(answer.json()).error
        assert says in error.message
        assert error.code == "unsupported_endpoint"


def test_a_suffix_is_refused_with_what_to_type(http):
    answer = http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "suffix"
    assert "write it into prompt" in error["message"]
