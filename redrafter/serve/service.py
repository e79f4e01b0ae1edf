"""From an OpenAI request to texts of the engine."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.stopping import end_tokens
from redrafter.grammar.grammar import Grammar
from redrafter.scheduler.sequence import SamplingParams
from redrafter.serve.answers.chat import ChatFormat
from redrafter.serve.answers.choice import Choice
from redrafter.serve.answers.completion import CompletionFormat
from redrafter.serve.answers.openai_format import collect_answer, raise_cuts_as_errors, stream_answer
from redrafter.serve.answers.prompt_logprobs import check_scores, prompt_logprobs
from redrafter.serve.answers.text import StopStrings, decode_tokens
from redrafter.serve.answers.usage import summarize
from redrafter.serve.chat.tool_schema import call_schema
from redrafter.serve.grammars import Grammars
from redrafter.serve.metrics import Metrics
from redrafter.serve.prompts import Prompts
from redrafter.serve.protocol.requests import MAX_PROMPTS, ApiError, ChatRequest, CompletionRequest, StreamOptions
from redrafter.serve.worker import Worker

__all__ = ["Service"]

COLDEST = 1e-5  # a temperature below it divides logits to more than a number holds: it is greedy, as vLLM has it
COMPLETION = 16  # tokens that a completion without max_tokens comes to, as OpenAI has it

AnyRequest = CompletionRequest | ChatRequest
Facts = dict[str, Any]  # what a log may say of a request


@dataclass
class Service:
    """What the routes call.

    Args:
        worker: Writes the texts.
        tokenizer: The tokenizer of the model.
        model: The name that clients know.
        metrics: What `/metrics` tells.
        apart: Whether clients do not share the beginnings of texts that are in the cache, as they should not where each
            has a key of its own.
        special_tokens_in_content: Whether a control token that a message spells is one.
        reasoning: Whether thoughts are told apart from the answer, where the chat template has marks for them.
        created: When, in seconds since 1970.
    """

    worker: Worker
    tokenizer: PreTrainedTokenizerBase
    model: str
    metrics: Metrics
    apart: bool = False
    special_tokens_in_content: bool = False
    reasoning: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        vocabulary = self.worker.scheduler.engine.target.vocab_size
        self._grammars = Grammars(self.tokenizer)
        self._prompts = Prompts(self.tokenizer, self.model, vocabulary, self.context, self.special_tokens_in_content)

    @property
    def prompts(self) -> Prompts:
        """What reads prompts, as the routes do."""
        return self._prompts

    def model_entry(self) -> dict[str, Any]:
        """What a list of models says of this one."""
        entry = {"id": self.model, "object": "model", "created": self.created, "owned_by": "redrafter"}
        return entry | {"max_model_len": self.context}

    @property
    def context(self) -> int:
        return self.worker.scheduler.longest

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"the model {name!r} is not served here; {self.model!r} is", "model", "model_not_found")

    async def completion(
        self, request: CompletionRequest, facts: Facts
    ) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        self.check_model(request.model)
        prompts = await asyncio.to_thread(self._prompts.encode_prompts, request.prompt)
        echo = [decode_tokens(self.tokenizer, ids, True) for ids in prompts] if request.echo else None
        copies, told = request.copies, request.n or 1
        count = request.logprobs
        if copies > told and count is None:
            count = 0  # the best of more are known by their log-probabilities
        params = self._sampling_params(request, count, await self._grammar(_spec(request), _client(facts)))
        params = replace(params, prompt_logprobs=request.prompt_count)
        every = [ids for ids in prompts for _ in range(copies)]
        before = None if echo is None else [text for text in echo for _ in range(told)]
        form = CompletionFormat(before, request.logprobs, self.tokenizer, request.prompt_logprobs)
        max_new_tokens = COMPLETION if request.max_tokens is None else request.max_tokens
        return await self._serve(request, every, max_new_tokens, params, form, facts, (copies, told))

    async def chat(self, request: ChatRequest, facts: Facts) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        self.check_model(request.model)
        prompt = await asyncio.to_thread(self._prompts.encode_chat, request)
        count = (request.top_logprobs or 0) if request.logprobs else None
        grammar = await self._grammar(_spec(request), _client(facts))
        params = self._sampling_params(request, count, grammar)
        params = replace(params, prompt_logprobs=request.prompt_logprobs)
        max_new_tokens = request.max_completion_tokens or request.max_tokens or self.context
        # A grammar describes the whole text, so that there are no thoughts to split off.
        thinks = self.reasoning and self._prompts.template.has_think_tags and grammar is None
        form = ChatFormat(
            count,
            self.tokenizer,
            frozenset(tool.function.name for tool in request.callable_tools),
            parallel_calls=request.parallel_tool_calls is not False,
            split_thoughts=thinks,
            thinking=thinks and prompt.thinking,
        )
        return await self._serve(request, [prompt.ids] * (request.n or 1), max_new_tokens, params, form, facts)

    async def _serve(
        self,
        request: AnyRequest,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        params: SamplingParams,
        form: CompletionFormat | ChatFormat,
        facts: Facts,
        best: tuple[int, int] = (1, 1),
    ) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        if len(prompts) > MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts)} texts in one request; at most {MAX_PROMPTS}", "n")
        check_scores(prompts, params.prompt_logprobs)
        stops = request.stops
        make = (lambda: StopStrings(stops, self.tokenizer)) if stops else (lambda: None)
        asked = request.stream_options or StreamOptions()
        choices = [Choice(self.tokenizer, stops, asked.include_drafts) for _ in prompts]
        client = _client(facts)
        deltas = self.worker.deltas(
            prompts, max_new_tokens, params, make, client, self._salt(client, request.cache_salt)
        )
        if not request.stream:
            found = await collect_answer(deltas, choices, form, self.model, best)
            if isinstance(request, ChatRequest) and request.prompt_logprobs is not None and choices[0].job is not None:
                sequence, count = choices[0].job, request.prompt_logprobs
                found["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, sequence, count, self.tokenizer)
            facts |= summarize(choices)
            return found
        parts = stream_answer(deltas, choices, form, self.model, asked)
        first = await anext(parts)  # what is refused is refused with a status, not within a stream

        async def every() -> AsyncIterator[dict[str, Any]]:
            try:
                yield first
                async for part in raise_cuts_as_errors(parts):
                    yield part
            finally:
                await parts.aclose()  # type: ignore[attr-defined]
                await deltas.aclose()  # type: ignore[attr-defined]
                facts.update(summarize(choices))

        return every()

    def _salt(self, client: str, asked: str | None) -> str | None:
        """Return what requests must have in common to share the beginnings of texts."""
        own = client if self.apart else ""
        return json.dumps([own, asked]) if own or asked else None

    def _sampling_params(self, request: AnyRequest, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
        """As asked for; else as the model's own generation config has it; else as OpenAI has it."""
        engine = self.worker.scheduler.engine
        own = engine.model.generation_config

        ends = frozenset(end_tokens(engine.model, self.tokenizer))

        def pick(name: str, neutral: Any) -> Any:
            asked, said = getattr(request, name), getattr(own, name, None)
            return asked if asked is not None else neutral if said is None else said

        plain = 0.0 if engine.do_sample is False else 1.0
        temperature = request.temperature if request.temperature is not None else own.temperature or plain
        if grammar is not None and request.ignore_eos:
            raise ApiError(400, "a text that follows a grammar ends with it: leave out ignore_eos", "ignore_eos")
        return SamplingParams(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_k=max(pick("top_k", 0), 0),
            top_p=pick("top_p", 1.0),
            min_p=pick("min_p", 0.0),
            repetition_penalty=pick("repetition_penalty", 1.0),
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias=self._bias(request.logit_bias),
            min_new_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset() if request.ignore_eos else ends | frozenset(request.stop_token_ids or ()),
            seed=secrets.randbits(61) if request.seed is None else request.seed,
            logprobs=logprobs,
            grammar=grammar,
            speculate=request.speculate,
        )

    async def _grammar(self, spec: dict[str, Any] | None, client: str) -> Grammar | None:
        """Compile a grammar, which may take a while, beside what is being served. client: who asks for it."""
        return None if spec is None else await self._grammars.get(spec, client)

    def _bias(self, given: dict[str, float] | None) -> dict[int, float]:
        vocabulary = self.worker.scheduler.engine.target.vocab_size
        found = {}
        for token, value in (given or {}).items():
            if not (token.isdecimal() and len(token) < 20 and int(token) < vocabulary):
                raise ApiError(
                    400, f"logit_bias names {token!r}, which is no token id below {vocabulary}", "logit_bias"
                )
            found[int(token)] = value
        return found


def _client(facts: Facts) -> str:
    """Return who asks, as the routes know it."""
    return str(facts.get("client", ""))


def _spec(request: AnyRequest) -> dict[str, Any] | None:
    """What `Grammar.of` reads, where something asks for a grammar."""
    if request.structured_outputs is not None:
        [(kind, value)] = ((name, each) for name, each in request.structured_outputs if each is not None)
        return {"json_schema" if kind == "json_" else kind: value}
    if isinstance(request, CompletionRequest):
        return None
    if (schema := call_schema(request)) is not None:
        return {"json_schema": schema}
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is not None:
        return {"json_schema": asked.json_schema.schema_}
    return {"json_object": True} if asked.lark_grammar is None else {"lark": asked.lark_grammar}
