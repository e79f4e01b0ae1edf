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
from redrafter.serve.protocol.answers import ErrorAnswer
from redrafter.version import __version__


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    server = Program("--max-batch-size", "8", "--api-key", "secret")
    yield server
    assert server.end() == 0


@pytest.fixture(scope="module")
def http(program) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=program.url, headers={"Authorization": "Bearer secret"}, timeout=300) as client:
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


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_added_where_it_is_asked_for(http, tokenizer, special):
    answer = http.post("/tokenize", json={"prompt": "The sea", "add_special_tokens": special}).json()
    assert answer["tokens"] == tokenizer("The sea", add_special_tokens=special).input_ids
    assert answer["token_strs"] is None


TALK = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("begun", [True, False])
def test_messages_are_told_as_the_template_writes_them(http, tokenizer, begun):
    answer = http.post("/tokenize", json={"messages": TALK, "add_generation_prompt": begun}).json()
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=begun)
    assert answer["tokens"] == tokenizer(text, add_special_tokens=False).input_ids


def test_messages_are_counted_as_a_chat_counts_them(http):
    chat = http.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 1}).json()
    answer = http.post("/tokenize", json={"messages": TALK}).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_a_prompt_longer_than_the_context_is_counted_and_one_without_end_refused(http):
    answer = http.post("/tokenize", json={"prompt": "sea " * 1500}).json()
    assert answer["count"] > answer["max_model_len"]
    assert http.post("/tokenize", json={"prompt": "sea " * 500_000}, timeout=300).status_code == 400


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


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/responses", "/v1/embeddings"])
def test_the_key_is_asked_for_where_work_is_done(program, path):
    assert httpx.post(f"{program.url}{path}", json={"prompt": "a", "tokens": []}, timeout=300).status_code == 401


def test_the_version_is_told_to_all(program):
    assert httpx.get(f"{program.url}/version", timeout=300).json() == {"version": __version__}


def test_a_model_is_told_by_its_name(program, http):
    client = openai.OpenAI(base_url=f"{program.url}/v1", api_key="secret", max_retries=0)
    assert client.models.retrieve("boxed") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'boxed' is") as refusal:
        client.models.retrieve("some/other")
    assert refusal.value.code == "model_not_found"


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
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_what_is_not_served_is_refused_by_name(path, says, method, http):
    answer = http.request(method, f"/v1/{path}", json={"input": "a"} if method == "POST" else None)
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
