"""Sixty-four clients of all kinds at once, of whom a third leave: what each gets is what `generate` writes for it
alone."""

import asyncio
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from helpers.processes import soon
from helpers.serving import Address, Program
from redrafter.cache.paged import KVCachePool
from redrafter.chat.messages import describe_tools
from redrafter.serve.answers.lark import LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.request_grammar import forced_tools

STORY = (
    "The old man looked at the sea and said that no ship would come today because the wind had turned in the night; "
    "so the children went home, lit a fire, and told each other stories of whales, of storms and of far white harbours"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: sum\nsum: NUM | sum ("+" | "-") NUM\nNUM: /[1-9][0-9]?/'
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9}-[0-9]{2}( [a-z]+){2,5}"},
    {"choice": ["yes", "no", "perhaps it was the wind"]},
    {"lark": LARK},
    {"json": SCHEMA},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("find_person", "find_dog")
]
TALK = [{"role": "user", "content": "Hello"}]
FORCED = forced_tools(ChatRequest.model_validate({"messages": TALK, "tools": TOOLS, "tool_choice": "required"}))
WRITER = LarkWriter({})
CALL = WRITER.source(ChatReader.write_forced(WRITER, FORCED)).text


@dataclass
class Ask:
    """One request. own: what `generate` is told beside a seed. leaves: when its client goes: after so many parts of a
    stream, or a hundredth of a second each."""

    prompt: str
    body: dict[str, Any]
    own: dict[str, Any]
    chat: bool
    stream: bool
    leaves: int | None

    @property
    def copies(self) -> int:
        return int(self.body.get("n", 1))


@dataclass
class Told:
    """What a client heard of one text."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish: str | None = None
    calls: list[Any] = field(default_factory=list)


def ask(number: int) -> Ask:
    """The same one for the same number."""
    made = random.Random(number)
    some = lambda share: made.random() < share  # noqa: E731
    chat, count = some(0.4), made.randrange(4, 32)
    ask = Ask(STORY[made.randrange(len(STORY) - 5) :], {"max_tokens": count, "seed": number}, {}, chat, some(0.6), None)
    temperature = made.choice([0, 0, 0.7, 1.0, 1.3])
    ask.body["temperature"] = temperature
    ask.own = {"do_sample": temperature > 0, "max_new_tokens": count}
    if temperature:
        cut = {"top_p": 0.8} if some(0.3) else {"min_p": 0.02} if some(0.2) else {}
        cut["top_k"] = 20 if some(0.3) else 0
        ask.body |= cut
        ask.own |= cut | {"temperature": temperature}
    for name, value in (("frequency_penalty", 0.5), ("presence_penalty", -0.4), ("repetition_penalty", 1.2)):
        if some(0.25):
            ask.body[name] = ask.own[name] = value
    if some(0.25):
        ask.body["logit_bias"], ask.own["logit_bias"] = {"300": 4, "12": -100}, {300: 4.0, 12: -100.0}
    if some(0.5):
        _guide(ask, made)
    elif some(0.4):
        ask.body["stop"] = ask.own["stop_strings"] = made.sample([" the", ".", "e w", "and ", "zzz"], 3)
    if some(0.3):
        ask.body["logprobs"] = True if chat else 2
    if some(0.3):
        ask.body["n"] = made.randrange(2, 4)
    if some(0.33):
        ask.leaves = made.randrange(1, 6)
        ask.body["max_tokens"], ask.own["max_new_tokens"] = 600, 45  # more than is written, and than is heard
    return ask


def _guide(ask: Ask, made: random.Random) -> None:
    """Give it a grammar."""
    ask.body["max_tokens"] = ask.own["max_new_tokens"] = 40
    kind = made.randrange(3) if ask.chat else 0
    if kind == 0:
        spec = made.choice(GRAMMARS)
        ask.body["structured_outputs"] = spec
        ask.own["grammar"] = {"json_schema": spec["json"]} if "json" in spec else spec
    elif kind == 1:
        form = {"name": "person", "schema": SCHEMA, "strict": True}
        ask.body["response_format"] = {"type": "json_schema", "json_schema": form}
        ask.own["grammar"] = {"json_schema": SCHEMA}
    else:
        ask.body |= {"tools": TOOLS, "tool_choice": "required"}
        ask.own["grammar"] = {"lark": CALL}


async def heard(client: "openai.AsyncOpenAI", ask: Ask) -> list[Told]:
    """What its client hears. Of a client that leaves a stream, until then; else nothing."""
    where = client.chat.completions if ask.chat else client.completions
    talk = {"messages": [{"role": "user", "content": ask.prompt}]} if ask.chat else {"prompt": ask.prompt}
    known = {"structured_outputs", "top_k", "min_p", "repetition_penalty"}
    extra = {name: value for name, value in ask.body.items() if name in known}
    body = {name: value for name, value in ask.body.items() if name not in known}
    asked = where.create(model="boxed", **talk, **body, stream=ask.stream, extra_body=extra)
    if ask.stream:
        return await _streamed(await asked, ask)
    try:
        found = await asyncio.wait_for(asked, None if ask.leaves is None else ask.leaves / 100)
    except asyncio.TimeoutError:
        return []
    told = [Told() for _ in found.choices]
    for each, choice in zip(told, found.choices, strict=True):
        _take(each, choice, choice.message if ask.chat else choice)
    return told


async def _streamed(parts: "openai.AsyncStream", ask: Ask) -> list[Told]:
    told = [Told() for _ in range(ask.copies)]
    count = 0
    async for part in parts:
        for choice in part.choices:
            _take(told[choice.index], choice, choice.delta if ask.chat else choice)
        count += 1
        if count == ask.leaves:
            await parts.close()
            break
    return told


def _take(told: Told, choice: Any, said: Any) -> None:
    told.text += (said.content if hasattr(said, "content") else getattr(said, "text", None)) or ""
    for call in getattr(said, "tool_calls", None) or []:
        if call.id is not None:
            told.calls.append([call.function.name, ""])
        told.calls[-1][1] += call.function.arguments
    told.finish = choice.finish_reason or told.finish
    if choice.logprobs is not None:
        content = getattr(choice.logprobs, "content", None)
        told.tokens += choice.logprobs.tokens if content is None else [entry.token for entry in content]


class Alone:
    """What `generate` writes for an ask without drafts, number i of its texts under seed + i."""

    def __init__(self, engine: Any, tokenizer: Any):
        self.engine, self.tokenizer = engine, tokenizer
        self._known: dict[tuple[int, int], list[int]] = {}

    def ids(self, ask: Ask, copy: int) -> list[int]:
        key = ask.body["seed"], copy
        if key not in self._known:
            prompt = torch.tensor([self._prompt(ask)])
            seed = {"seed": ask.body["seed"] + copy} if ask.own["do_sample"] else {}
            found = self.engine.generate(prompt, **ask.own, **seed, tokenizer=self.tokenizer, speculate=False)
            self._known[key] = found[0, prompt.shape[1] :].tolist()
        return self._known[key]

    def _prompt(self, ask: Ask) -> list[int]:
        if not ask.chat:
            return self.tokenizer(ask.prompt).input_ids
        talk = [{"role": "user", "content": ask.prompt}]
        if "tools" in ask.body:
            talk.insert(0, {"role": "system", "content": describe_tools(TOOLS)})
        text = self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def text(self, ask: Ask, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        places = [place for stop in ask.body.get("stop", ()) if (place := text.find(stop)) >= 0]
        return text[: min(places, default=None)]

    def check(self, ask: Ask, told: list[Told]) -> None:
        for copy, each in enumerate(told):
            ids = self.ids(ask, copy)
            text = self.text(ask, ids)
            tokens = [self.tokenizer.decode([token]) for token in ids if token != self.tokenizer.eos_token_id]
            if each.finish is None:
                assert ask.leaves is not None, ask
                assert text.startswith(each.text), ask
                assert each.tokens == tokens[: len(each.tokens)]
            elif each.finish == "tool_calls":
                [[name, arguments]] = each.calls
                wanted = json.loads(text)  # a call may name its arguments in either way
                wanted["arguments"] = wanted.pop("parameters", wanted.get("arguments"))
                assert {"name": name, "arguments": json.loads(arguments)} == wanted, ask
            elif each.calls:  # no token was left before its end
                [[name, arguments]] = each.calls
                assert each.finish == "length", ask
                assert f'"{name}"' in text, ask
                assert text.endswith(arguments), ask
            else:
                assert each.text == text, ask
                assert each.finish == ("stop" if self._ended(ask, ids, text) else "length")
            if each.finish is not None and "logprobs" in ask.body:
                assert each.tokens == tokens, ask

    def _ended(self, ask: Ask, ids: list[int], text: str) -> bool:
        return ids[-1] == self.tokenizer.eos_token_id or text != self.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def alone(pair) -> Alone:
    return Alone(*pair)


def gauge(program: Address, name: str) -> float:
    lines = program.get("/metrics").text
    [value] = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", lines, re.MULTILINE)
    return float(value)


def is_idle(program: Address) -> bool:
    return not any(gauge(program, name) for name in ("num_requests_running", "num_requests_waiting"))


async def _all(program: Address, asks: list[Ask]) -> list[list[Told]]:
    async with openai.AsyncOpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(heard(client, each) for each in asks))


def check_all(program: Address, alone: Alone, asks: list[Ask]) -> None:
    found = asyncio.run(_all(program, asks))
    for each, told in zip(asks, found, strict=True):
        alone.check(each, told)
    whole = [told for each in found for told in each if told.finish is not None]
    assert len(whole) > 0.5 * len(asks)
    assert any(told.calls for told in whole)
    assert soon(lambda: is_idle(program))
    assert gauge(program, "kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_sixty_four_at_once_get_what_each_would_alone(alone):
    program = Program("--max-batch-size", "64")
    check_all(program, alone, [ask(number) for number in range(64)])
    assert program.end() == 0


@pytest.mark.slow
def test_rows_that_are_put_back_write_the_same(alone):
    shapes = alone.engine.target.shapes
    share = 100 * KVCachePool.block_bytes(shapes) / psutil.virtual_memory().available
    program = Program("--max-batch-size", "64", "--kv-cache-free-gpu-memory-fraction", f"{share:.9f}")
    check_all(program, alone, [ask(number) for number in range(64)])
    assert gauge(program, "num_preemptions_total") > 0
    assert program.end() == 0
