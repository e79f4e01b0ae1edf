"""The service behind the routes: OpenAI's requests become sequences of the engine, and these become answers."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import NEUTRAL, NUMBERS, SamplingParams
from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve.answers.choice import Choice, StopStrings, summarize
from redrafter.serve.answers.formats import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    check_scores,
    collect_answer,
    prompt_logprobs,
    raise_cuts_as_errors,
    stream_answer,
)
from redrafter.serve.engine_process.client import EngineClient, Stopped
from redrafter.serve.images import ImageReader
from redrafter.serve.metrics import Metrics
from redrafter.serve.prompts import Prompts
from redrafter.serve.protocol.fields import MAX_PROMPTS, StreamOptions
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest, Message
from redrafter.serve.tools import call_schema

MIN_TEMPERATURE = 1e-5  # lower ones would overflow the logits: they mean greedy decoding, as in vLLM
DEFAULT_COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API

AnyRequest = CompletionRequest | ChatRequest
R = TypeVar("R")
T = TypeVar("T")
Facts = dict[str, Any]  # what the log says of a request, by name
Answer = dict[str, Any] | AsyncIterator[dict[str, Any]]  # a whole one, or the parts of a stream


@dataclass
class Service:
    """Answers requests for completions and chats.

    Attributes:
        engine: Writes the texts.
        tokenizer: Tokenizer of the model.
        model: Name of the model that clients use.
        metrics: Metrics of the engine.
        apart: Whether clients do not share prefixes in the cache, as they should not if each has a key of its own.
        special_tokens_in_content: Whether a control token that is spelled out in a message counts as one.
        images: Reads the images of chats, or says why none are read.
        reasoning: Whether thoughts are separated from the answer, if the chat template has marks for them.
        created: When the service started, in seconds since 1970.
        prompts: Reads the prompts of requests.
        adapters: Directories of the LoRA adapters that are served, by name.
    """

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    model: str
    metrics: Metrics
    apart: bool = False
    special_tokens_in_content: bool = False
    images: ImageReader | str = Prompts.images
    reasoning: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        facts = self.engine.facts
        self.adapters = dict(facts.adapters)
        self.prompts = Prompts(
            self.tokenizer, self.model, facts.vocab_size, facts.context, self.special_tokens_in_content, self.images
        )

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry of this model, or of an adapter, in a list of models."""
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "redrafter"}
        return entry | {"max_model_len": self.context, "parent": self.model if name in self.adapters else None}

    @property
    def model_entries(self) -> list[dict[str, Any]]:
        """The list of models: the model itself, then its adapters."""
        return [self.model_entry(name) for name in (self.model, *self.adapters)]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.engine.facts.context

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for the name of neither the model nor an adapter; None is the model."""
        if name is None or name == self.model or name in self.adapters:
            return
        adapters = f", and so are its adapters {', '.join(map(repr, self.adapters))}" if self.adapters else ""
        message = f"the model {name!r} is not served here; {self.model!r} is{adapters}"
        raise ApiError(404, message, "model", "model_not_found")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a directory of this machine, as a model of this name, or raise `ApiError`."""
        if name in self.adapters or name == self.model:
            raise ApiError(400, f"The lora adapter '{name}' has already been loaded.", "lora_name")
        if not await asyncio.to_thread(os.path.isdir, path):
            raise ApiError(404, f"No adapter found for '{path}': it is no directory of the server", "lora_path")
        try:
            await self.engine.change_adapters(name, path)
        except Stopped:
            raise
        except ReDrafterError as error:
            raise ApiError(400, str(error), "lora_path") from error
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Serve a LoRA adapter no longer, or raise `ApiError` if there is none. Its texts continue."""
        if name not in self.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        del self.adapters[name]
        await self.engine.change_adapters(name, None)

    async def completion(self, request: CompletionRequest, facts: Facts) -> Answer:
        """Answer a request for completions, and add to the facts that are logged of it."""
        self.check_model(request.model)
        prompts = await asyncio.to_thread(self.prompts.encode_prompts, request.prompt)
        copies, kept = request.copies, request.n or 1
        echo = None
        if request.echo:
            texts = [decode_tokens(self.tokenizer, ids, True) for ids in prompts]
            echo = [text for text in texts for _ in range(kept)]
        # Of more texts than are asked for, the best ones are chosen by their log-probabilities.
        count = 0 if copies > kept and request.logprobs is None else request.logprobs
        grammar = _grammar_source(request)
        params = self._sampling_params(request, count, request.prompt_count, grammar)
        form = CompletionFormat(echo, request.logprobs, self.tokenizer, request.prompt_logprobs)
        max_new_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        copied = [ids for ids in prompts for _ in range(copies)]
        return await self._serve(request, copied, max_new_tokens, params, grammar, form, facts, (copies, kept))

    async def chat(self, request: ChatRequest, facts: Facts) -> Answer:
        """Answer a request for a chat, as `completion` does."""
        self.check_model(request.model)
        prompt = await self.encode(self.prompts.encode_chat, request, request.messages, facts)
        if prompt.images is not None and request.prompt_logprobs is not None:
            raise ApiError(400, "the tokens of a prompt with images are not scored: leave it out", "prompt_logprobs")
        count = (request.top_logprobs or 0) if request.logprobs else None
        grammar = _grammar_source(request)
        params = self._sampling_params(request, count, request.prompt_logprobs, grammar)
        max_new_tokens = request.max_completion_tokens or request.max_tokens or self.context
        # A grammar describes the whole text, so that there are no thoughts to split off.
        thinks = self.reasoning and self.prompts.template.has_think_tags and grammar is None
        form = ChatFormat(
            count,
            self.tokenizer,
            frozenset(tool.function.name for tool in request.callable_tools),
            parallel_calls=request.parallel_tool_calls is not False,
            split_thoughts=thinks,
            thinking=thinks and prompt.thinking,
        )
        prompts = [prompt.ids] * (request.n or 1)
        return await self._serve(request, prompts, max_new_tokens, params, grammar, form, facts, images=prompt.images)

    async def encode(
        self,
        encode: Callable[[R, SandboxedProcess | None], T],
        request: R,
        messages: Sequence[Message] | None,
        facts: Facts,
    ) -> T:
        """Encode a request in a thread; one whose messages have images, when it is its client's turn.

        `encode` is called with the request and a process that decodes its images, None where it has none.
        """
        if isinstance(self.images, str) or not any(message.images for message in messages or ()):
            return await asyncio.to_thread(encode, request, None)
        return await self.images.run(lambda decoder: encode(request, decoder), str(facts.get("client", "")))

    async def _serve(
        self,
        request: AnyRequest,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        params: SamplingParams,
        grammar: GrammarSource | None,
        form: AnswerFormat,
        facts: Facts,
        best: tuple[int, int] = (1, 1),
        images: dict[str, Any] | None = None,
    ) -> Answer:
        if len(prompts) > MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts)} texts in one request; at most {MAX_PROMPTS}", "n")
        check_scores(prompts, params.prompt_logprobs)
        stops = request.stops
        make = (lambda: StopStrings(stops, self.tokenizer)) if stops else (lambda: None)
        asked = request.stream_options or StreamOptions()
        choices = [Choice(self.tokenizer, stops, asked.include_drafts) for _ in prompts]
        client, name = str(facts.get("client", "")), request.model or self.model
        owner = client if self.apart else ""
        deltas = self.engine.deltas(
            prompts,
            max_new_tokens,
            params,
            make,
            grammar,
            client,
            json.dumps([owner, request.cache_salt]) if owner or request.cache_salt else None,
            None if name == self.model else name,  # an adapter; the engine refuses one that was unloaded a moment ago
            images=images,
        )
        if images is not None and not isinstance(self.images, str):
            deltas = self.images.count(deltas, images, client)
        if not request.stream:
            async with aclosing(deltas):  # or else the engine would go on after an error
                body = await collect_answer(deltas, choices, form, name, best)
            sequence, count = choices[0].sequence, request.prompt_logprobs
            if isinstance(request, ChatRequest) and count is not None and sequence is not None:
                body["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, sequence, count, self.tokenizer)
            facts |= summarize(choices)
            return body
        parts = stream_answer(deltas, choices, form, name, asked)
        try:
            first = await anext(parts)  # so that a refusal is answered with a status, not within a stream
        except BaseException:
            await deltas.aclose()
            raise

        async def all_parts() -> AsyncIterator[dict[str, Any]]:
            try:
                yield first
                async for part in raise_cuts_as_errors(parts):
                    yield part
            finally:
                await parts.aclose()  # type: ignore[attr-defined]
                await deltas.aclose()
                facts.update(summarize(choices))

        return all_parts()

    def _sampling_params(
        self, request: AnyRequest, logprobs: int | None, prompt_logprobs: int | None, grammar: GrammarSource | None
    ) -> SamplingParams:
        """Return the parameters of a request, whose grammar the engine adds; by default, those of the engine."""
        facts = self.engine.facts

        def pick(name: str) -> Any:
            asked = getattr(request, name)
            return facts.sampling.get(name, getattr(NEUTRAL, name)) if asked is None else asked

        temperature = pick("temperature")
        if grammar is not None and request.ignore_eos:
            raise ApiError(400, "a text that follows a grammar ends with it: leave out ignore_eos", "ignore_eos")
        bias = {}
        for token, value in (request.logit_bias or {}).items():
            if not (token.isdecimal() and len(token) < 20 and int(token) < facts.vocab_size):
                what = f"logit_bias names {token!r}, which is no token id below {facts.vocab_size}"
                raise ApiError(400, what, "logit_bias")
            bias[int(token)] = value
        ends = facts.end_tokens | frozenset(request.stop_token_ids or ())
        numbers = {name: pick(name) for name in NUMBERS if hasattr(request, name)}
        return SamplingParams(
            **numbers | {"top_k": max(numbers["top_k"], 0)},
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            logit_bias=bias,
            min_new_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset() if request.ignore_eos else ends,
            seed=secrets.randbits(61) if request.seed is None else request.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            speculate=request.speculate,
        )


def _grammar_source(request: AnyRequest) -> GrammarSource | None:
    """Return the grammar that a request asks for, or None."""
    spec: dict[str, Any] | None = None
    if request.structured_outputs is not None:
        [(kind, value)] = ((name, value) for name, value in request.structured_outputs if value is not None)
        spec = {"json_schema" if kind == "json_" else kind: value}
    elif isinstance(request, ChatRequest):
        form = request.response_format
        if (schema := call_schema(request)) is not None:
            spec = {"json_schema": schema}
        elif form is not None and form.json_schema is not None:
            spec = {"json_schema": form.json_schema.schema_}
        elif form is not None and form.type != "text":
            spec = {"json_object": True} if form.lark_grammar is None else {"lark": form.lark_grammar}
    return None if spec is None else GrammarSource.of(spec)
