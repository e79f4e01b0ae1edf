"""Other people's clients against the running program, as they come. Each is skipped where it is not installed.

docs/serving.md lists the versions with which they were run. `REDRAFTER_URL` names a server that runs elsewhere, for
clients that stand in an environment of their own.
"""

import os
from typing import Literal

import pytest

pytest.importorskip("openai")

from pydantic import BaseModel, ConfigDict, Field

TALK = [{"role": "user", "content": "Find Rex, a dog who lives at the harbour."}]


class Place(BaseModel):
    """Where somebody lives."""

    model_config = ConfigDict(extra="forbid")  # else a small model makes keys up until it has no room

    name: str = Field(max_length=12)
    kind: Literal["town", "harbour", "farm"]


class Dog(BaseModel):
    """A dog that is looked for."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)
    home: Place


@pytest.fixture(scope="module")
def url(request) -> str:
    given = os.environ.get("REDRAFTER_URL") or request.getfixturevalue("program").url
    return f"{given}/v1"


SETTINGS = {"model": "boxed", "max_tokens": 800, "seed": 3, "temperature": 0.5}


def langchain(url: str, **more: object):
    kind = pytest.importorskip("langchain_openai").ChatOpenAI
    settings = {"temperature": 0.5, "seed": 3, "max_tokens": 800, "max_retries": 0} | more
    return kind(model="boxed", base_url=url, api_key="none", **settings)


def test_langchain_writes_and_streams(url):
    model = langchain(url, max_tokens=20)
    whole = model.invoke("Tell me of the sea")
    assert whole.content
    assert 0 < whole.usage_metadata["output_tokens"] <= 20
    assert "".join(part.content for part in model.stream("Tell me of the sea")) == whole.content


def test_langchain_writes_by_the_responses_protocol(url):
    model = langchain(url, max_tokens=20, use_responses_api=True, seed=None)
    assert 0 < model.invoke("Tell me of the sea").usage_metadata["output_tokens"] <= 20
    assert list(model.stream("Tell me of the sea"))


def test_langchain_binds_tools(url):
    answer = langchain(url).bind_tools([Dog], tool_choice="any").invoke("Find Rex")
    [call] = answer.tool_calls
    assert call["name"] == "Dog"
    assert Dog.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_writes_types(url, method):
    assert isinstance(langchain(url).with_structured_output(Dog, method=method).invoke("Find Rex"), Dog)


def test_langchain_speaks_anthropics_protocol(url):
    kind = pytest.importorskip("langchain_anthropic").ChatAnthropic
    settings = {"model": "boxed", "base_url": url.removesuffix("/v1"), "api_key": "none", "max_retries": 0}
    model = kind(**settings, max_tokens=20, temperature=0)
    whole = model.invoke("Tell me of the sea")
    assert 0 < whole.usage_metadata["output_tokens"] <= 20
    assert "".join(part.content for part in model.stream("Tell me of the sea")) == whole.content
    called = kind(**settings, max_tokens=800, temperature=0.5).bind_tools([Dog], tool_choice="any").invoke("Find Rex")
    assert [call["name"] for call in called.tool_calls] == ["Dog"]
    assert Dog.model_validate(called.tool_calls[0]["args"])


def test_litellm_writes_streams_and_calls(url):
    litellm = pytest.importorskip("litellm")
    same = {"model": "openai/boxed", "api_base": url, "api_key": "none", "seed": 3, "max_retries": 0}
    whole = litellm.completion(messages=TALK, max_tokens=20, **same)
    assert 0 < whole.usage.completion_tokens <= 20
    parts = litellm.completion(messages=TALK, max_tokens=20, stream=True, **same)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    parameters = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 20}}, "required": ["age"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    called = litellm.completion(messages=TALK, tools=[tool], tool_choice="required", max_tokens=100, **same)
    assert called.choices[0].message.tool_calls[0].function.name == "find"
    typed = litellm.completion(messages=TALK, response_format=Dog, max_tokens=800, **same)
    assert Dog.model_validate_json(typed.choices[0].message.content)
    told = litellm.text_completion(prompt="The sea", max_tokens=5, **same | {"model": "text-completion-openai/boxed"})
    assert told.usage.completion_tokens == 5


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_writes_nested_types(url, mode):
    instructor = pytest.importorskip("instructor")
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    dog = client.chat.completions.create(messages=TALK, response_model=Dog, max_retries=0, **SETTINGS)
    assert isinstance(dog, Dog)
