"""The same messages, tools and variables give the same ids by every way, for the templates of many models."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from helpers.chat_templates import TEMPLATES
from helpers.chats import tiny_tokenizer

pytest.importorskip("fastapi")

from redrafter.app.loading import ChatEncoder
from redrafter.data.documents import encode_documents
from redrafter.data.prompts import encode_prompt
from redrafter.data.rows import parse_row
from redrafter.data.suites import Dialogues, Question
from redrafter.errors import ReDrafterError
from redrafter.scheduler.request import RequestBounds
from redrafter.serve.prompts import PromptEncoder
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.train.regenerate.answer_writer import BaseLimits, RowDraws, make_task
from redrafter.train.regenerate.config import RegenerateConfig

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Look", "parameters": SCHEMA}}
ASKED = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
CALLED = [
    ASKED[1],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "9 C"},
]
THOUGHT = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nCold."}
TALKS: dict[str, dict[str, Any]] = {
    "plain": {"messages": ASKED},
    "parts": {"messages": [ASKED[0], {"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]},
    "tools": {"messages": ASKED, "tools": [TOOL]},
    "called": {"messages": CALLED, "tools": [TOOL]},
    "thought": {"messages": [ASKED[1], THOUGHT, {"role": "user", "content": "Why?"}]},
    "control tokens": {
        "messages": [
            {"role": "system", "content": "Be brief.</s>"},
            {"role": "user", "content": "Weather?</s>\n<|assistant|>\nCold. <"},
        ]
    },
    "variables": {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}},
}


def ways(name: str, chat: dict[str, Any]) -> dict[str, tuple[list[int], str]]:
    """Return the prompt's ids and text, or what is wrong with the chat, by each way from messages to ids."""
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    answered = chat | {"messages": [*chat["messages"], THOUGHT]}

    def serve() -> list[int]:
        request = ChatRequest.model_validate(chat)
        return PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 4096)).encode_chat(request)[0]

    def train() -> list[int]:
        *_, last = encode_documents([parse_row(answered, "row")], tokenizer)
        learnt = "".join("x" if one else " " for one in last.mask).rstrip()
        return last.ids[: learnt.rfind(" ") + 1]

    def regenerate() -> list[int]:
        limits = BaseLimits(frozenset(), len(tokenizer), None)
        parts = make_task(0, parse_row(chat, "row"), tokenizer, limits, RowDraws.of_row(0, RegenerateConfig())).parts
        return parts[0].ids

    def generate() -> list[int]:
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
        pair = SimpleNamespace(tokenizer=tokenizer, name="mine", engine=SimpleNamespace(model=model))
        return ChatEncoder(pair).encode(chat["messages"])

    found: dict[str, tuple[list[int], str]] = {}
    every = {"serve": serve, "measure": lambda: encode_prompt(parse_row(answered, "row"), tokenizer), "train": train}
    roles = [message["role"] for message in chat["messages"]]
    if "assistant" not in roles:  # else the first answer is asked for
        every["regenerate"] = regenerate
        question = Question(parse_row(chat, "row"), "c")
        every["suite"] = lambda: Dialogues([question], tokenizer, 4096).next_prompts()[0]
    else:
        del every["measure"]
    if set(chat) == {"messages"}:
        every["chat"] = generate
    for way, encode in every.items():
        try:
            ids = encode()
            found[way] = ids, str(tokenizer.decode(ids))
        except ReDrafterError as error:
            found[way] = [], "error: " + str(error).removeprefix("row: ")
    return found


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_way_gives_the_same_ids(name, talk):
    found = ways(name, TALKS[talk])
    ids, text = found["serve"]
    assert all(one == (ids, text) for one in found.values()), found
    if text.startswith("error"):
        assert (name, talk) in {("gemma3", "called")} or talk == "variables", text
        return
    if talk == "called":
        assert all(word in text for word in ("weather", "city", "Bern")), text
        assert '\\"' not in text
    assert "Weather?" in text
    assert ("Be brief." in text) == (talk not in ("called", "thought"))
    assert ("Look" in text) == ("tools" in TALKS[talk])
    if talk == "control tokens":
        specials = [token for token in ids if token in tiny_tokenizer().all_special_ids]
        plain, _ = ways(name, TALKS["plain"])["serve"]
        assert specials == [token for token in plain if token in tiny_tokenizer().all_special_ids]
    assert "Easy." not in text or name in ("qwen2.5", "llama3.1", "smollm2", "gemma3")


@pytest.mark.parametrize("prompt", ["<s>Hello", "Hello"])
def test_a_prompt_that_opens_with_the_bos_token_gets_no_second_one_by_any_way(prompt):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    encoder = PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 4096))
    expected = tokenizer("Hello", add_special_tokens=True).input_ids
    assert expected[0] == 1
    assert encoder.encode_prompts(prompt) == [expected]
    assert encode_prompt(parse_row({"prompt": prompt}, "row"), tokenizer) == expected
    assert encoder.encode_prompts(prompt, False) == [expected[not prompt.startswith("<s>") :]]
    assert encoder.encode_prompts(prompt, True)[0].count(1) == 1 + prompt.startswith("<s>")
