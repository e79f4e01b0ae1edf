"""Conversations in the columns of several projects, and what of a row changes the context of an answer."""

import json
import sys
from types import SimpleNamespace

import pytest

from helpers.chats import tiny_tokenizer, write
from redrafter.data.documents import encode_documents
from redrafter.data.rows import Row, parse_row, read_rows
from redrafter.errors import CheckpointError

ASK = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "content": "9 C"}
SAY = {"role": "assistant", "content": "Cold."}
SHARED = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "Cold."}]
FUNCTION = {
    "name": "wx",
    "parameters": {"properties": {"city": {"type": "string", "default": None, "enum": ["x", None]}}},
}
TOOL = {"type": "function", "function": FUNCTION}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def call(arguments: object, **more: object) -> dict:
    function = {"name": "wx", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function} | more]}


CALL = call({"city": "Bern"})
JSON_CALL = json.dumps({"name": "wx", "arguments": {"city": "Bern"}})


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        # OpenAI's form: content that is null, missing or in parts, and calls as older clients and Arrow have them.
        ({"messages": [ASK, CALL | {"content": None}, RESULT, SAY]}, [ASK, CALL, RESULT, SAY]),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": CALL["tool_calls"]}]}, [ASK, CALL]),
        ({"messages": [ASK | {"content": [{"type": "text", "text": "Wea", "image_url": None}, "ther?"]}]}, [ASK]),
        ({"messages": [call({"city": "Bern", "unit": None}, index=None, id="c1")]}, [call({"city": "Bern"}, id="c1")]),
        ({"messages": [ASK, call('{"unit": null}')]}, [ASK, call('{"unit": null}')]),
        ({"messages": [ASK, call(None)]}, [ASK, call({})]),
        ({"messages": [{"role": "assistant", "function_call": {"name": "wx", "arguments": {"city": "Bern"}}}]}, [CALL]),
        ({"messages": [{"role": "assistant", "tool_calls": f"[{JSON_CALL}]"}]}, [CALL]),
        ({"messages": [{"role": "function", "content": "9 C", "name": "wx"}]}, [RESULT | {"name": "wx"}]),
        ({"messages": [{"role": "developer", "content": "x"}, ASK]}, [{"role": "developer", "content": "x"}, ASK]),
        ({"messages": [ASK, SAY | {"reasoning": "hm"}]}, [ASK, SAY | {"reasoning_content": "hm"}]),
        ({"messages": [ASK, SAY | {"weight": 0}, ASK, SAY | {"loss": False}]}, [ASK, SAY | {"weight": 0}] * 2),
        ({"messages": json.dumps([ASK, CALL])}, [ASK, CALL]),
        ({"system": "s", "messages": [ASK, SAY]}, [system("s"), ASK, SAY]),
        ({"system_prompt": "s", "messages": [system("s"), ASK]}, [system("s"), ASK]),
        ({"system": "", "turns": ["Weather?"]}, [ASK]),
        # ShareGPT, with LLaMA-Factory's speakers
        ({"system": "s", "conversations": SHARED}, [system("s"), ASK, SAY]),
        ({"conversations": [SHARED[0], {"from": "function_call", "value": JSON_CALL}]}, [ASK, CALL]),
        ({"conversations": [{"from": "function_call", "value": f"[{JSON_CALL}, {JSON_CALL}]"}]},
         [CALL | {"tool_calls": CALL["tool_calls"] * 2}]),
        ({"conversations": [*SHARED, {"from": "observation", "value": "9 C"}]}, [ASK, SAY, RESULT]),
        ({"conversations": json.dumps([*SHARED, {"from": "tool", "value": "9 C"}])}, [ASK, SAY, RESULT]),
        # Alpaca: next to these columns, even if they are empty, a row is a conversation.
        ({"instruction": "Sum", "input": "x", "system": None}, [{"role": "user", "content": "Sum\nx"}]),
        ({"instruction": "Weather?", "output": "Cold.", "system": "s", "history": [["a", "b"]]},
         [system("s"), {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, ASK, SAY]),
        ({"prompt": "Weather?", "completion": "Cold.", "tools": [TOOL]}, [ASK, SAY]),
        # TRL
        ({"prompt": [ASK], "completion": [SAY]}, [ASK, SAY]),
        ({"prompt": [ASK, SAY, ASK], "completion": [CALL, SAY]}, [ASK, SAY | {"weight": 0}, ASK, CALL, SAY]),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [SAY]}, [ASK, SAY]),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, [ASK, SAY]),
        ({"prompt": "Weather?", "chosen": [ASK, SAY]}, [ASK, SAY]),
        ({"prompt": "Weather?", "completion": [SAY]}, [ASK, SAY]),
        ({"input": [ASK], "output": "Cold.", "system_prompt": "s"}, [system("s"), ASK, SAY]),
    ],
)  # fmt: skip
def test_conversations_of_every_form_become_messages(row, messages):
    assert parse_row(row, "a:1").messages == messages


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": [FUNCTION]},
        {"tools": [{"type": "function"} | FUNCTION]},
        {"functions": [FUNCTION]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": [TOOL | {"strict": None}], "tool_choice": "auto"},
    ],
)
def test_tools_reach_the_row_in_one_form_with_the_nulls_of_their_schema(columns):
    for kind in ({"conversations": SHARED}, {"turns": ["Weather?"]}, {"instruction": "Weather?"}, {"prompt": [ASK]}):
        assert parse_row(kind | columns, "a:1").tools == [TOOL]
    assert parse_row({"messages": [ASK]} | columns | {"tool_choice": "none"}, "a:1").tools is None


def test_variables_of_the_template_reach_the_row():
    variables = {"enable_thinking": False, "custom": None}
    row = parse_row({"messages": [ASK], "chat_template_kwargs": variables, "documents": [{"text": "x"}]}, "a:1")
    assert row.template_kwargs == {"enable_thinking": False, "documents": [{"text": "x"}]}
    columns = {"enable_thinking": False, "reasoning_effort": "high", "documents": []}
    for kind in ({"messages": [ASK]}, {"prompt": "Weather?"}):
        row = parse_row(kind | columns, "a:1")
        assert row.template_kwargs == {"enable_thinking": False, "reasoning_effort": "high"}
    assert parse_row({"messages": [ASK], "chat_template_kwargs": "{}", "tools": ""}, "a:1") == Row(
        "a:1", messages=[ASK]
    )


def test_nulls_that_arrow_adds_to_objects_are_dropped_at_every_depth(monkeypatch):
    rows = [{"messages": [ASK, call({"city": "Bern", "at": {"hour": None}})], "tools": [TOOL], "system": None}]
    dataset = SimpleNamespace(load_dataset=lambda *names, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", dataset)
    (row,) = read_rows(["org/name"])
    assert row.messages == [ASK, call({"city": "Bern", "at": {}})]
    city = {"type": "string", "enum": ["x", None]}
    assert row.tools == [{"type": "function", "function": FUNCTION | {"parameters": {"properties": {"city": city}}}}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [ASK], "images": ["x.png"]}, 'a row has "images", and only text is read'),
        ({"text": "abc", "audio": {"path": "x"}}, 'a row has "audio"'),
        ({"messages": [ASK | {"images": ["x"]}]}, 'a turn has "images", which is not read'),
        ({"messages": [system("") | {"tools": [TOOL]}]}, 'a turn has "tools"'),
        ({"messages": [ASK | {"content": [{"type": "image_url", "image_url": {}}]}]}, "of type 'image_url'; only text"),
        ({"messages": [SAY | {"content": None}]}, 'a turn of role "assistant" needs a "content"'),
        ({"messages": [SAY | {"reasoning": "a", "thinking": "b"}]}, "which differ; leave one out"),
        ({"messages": [call([1])]}, 'the "arguments" of a call must be an object'),
        ({"conversations": [{"from": "function_call", "value": "wx()"}]}, '"tool_calls" is not JSON'),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, 'a call needs a "name"'),
        ({"messages": [ASK], "tools": "wx"}, '"tools" is not JSON'),
        ({"messages": [ASK], "tools": {"name": "wx"}}, '"tools" must be a list'),
        ({"messages": [ASK], "tools": [{"type": "web_search"}]}, 'a tool needs a function with a "name"'),
        ({"messages": [ASK], "tools": [TOOL], "functions": [FUNCTION]}, "leave one out"),
        ({"messages": [system("a"), ASK], "system": "b"}, 'one system message, here "system" and others differ'),
        ({"messages": [ASK], "history": [["a", "b"]]}, '"history" comes before an instruction'),
        ({"instruction": "x", "history": ["a", "b"]}, '"history" must be a list of pairs'),
        ({"prompt": "other", "chosen": [ASK, SAY]}, '"chosen" has turns of a user, but "prompt" is not among them'),
        ({"prompt": [ASK], "completion": [SAY], "chosen": [SAY]}, "both completion and chosen"),
        ({"messages": [ASK], "chat_template_kwargs": ["x"]}, '"chat_template_kwargs" must be an object'),
        ({"prompt": "x", "completion": "y", "label": False}, '"label" is false, which marks an answer to avoid'),
        ({"prompt": [ASK], "completion": [SAY], "label": False}, '"label" is false'),
        ({"prompt": "x", "context": "y", "response": "z"}, 'a row has "prompt" or "context", and not both'),
    ],
)
def test_what_changes_the_context_and_cannot_be_read_is_refused_by_name(row, said):
    with pytest.raises(CheckpointError, match=r"^a:1: ") as caught:
        parse_row(row, "a:1")
    assert said in str(caught.value)


def test_what_does_not_change_the_context_is_ignored():
    more = {"id": 3, "score": 0.5, "metadata": {"lang": "en"}, "images": [], "tools": None, "rejected": [SAY]}
    assert parse_row({"messages": [ASK, SAY]} | more, "a:1").messages == [ASK, SAY]


def test_a_column_that_is_null_in_a_row_reads_it_like_the_others(tmp_path):
    rows = [{"instruction": "hi", "output": "yes", "system": text} for text in ("be kind", "", None)]
    read = list(read_rows([write(tmp_path / "a.jsonl", rows)]))
    documents = list(encode_documents(read, tiny_tokenizer()))
    assert documents[1] == documents[2]
    assert tiny_tokenizer().decode(documents[2].ids) == "<s><|user|>\nhi\n<|assistant|>\nyes</s>\n"
