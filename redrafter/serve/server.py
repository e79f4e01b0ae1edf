"""A server: OpenAI's requests become sequences of the engine, and these become answers."""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.options import LoadOptions
from redrafter.app.templates import find_template, read_template
from redrafter.checkpoints.merged import boxed_pair
from redrafter.checkpoints.tokenizers import load_processor, load_tokenizer
from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import NEUTRAL, NUMBERS, SamplingParams
from redrafter.sandbox.process import SandboxedProcess
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.call_forms import call_form
from redrafter.serve.answers.choice import summarize
from redrafter.serve.answers.formats import (
    AnyChoice,
    ChatChoice,
    CompletionChoice,
    collect_answer,
    raise_cuts_as_errors,
    stream_answer,
)
from redrafter.serve.answers.lark import LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.answers.thoughts import Thinking, ThoughtMarks
from redrafter.serve.capture import Capture
from redrafter.serve.config import ServeOptions
from redrafter.serve.control_tokens import ControlTokens
from redrafter.serve.encoding import EncodingThreads
from redrafter.serve.engine_process.client import EngineClient, ServedSequence, Stopped
from redrafter.serve.engine_process.messages import EngineError, Submit
from redrafter.serve.engine_process.start import EngineProcess
from redrafter.serve.images import ImageReader
from redrafter.serve.metrics import Metrics
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys
from redrafter.serve.prompts import ChatTemplate, Prompts
from redrafter.serve.protocol.fields import MAX_PROMPTS, SMALL_BODY_BYTES, StreamOptions
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest, Message, TooManyTokensError
from redrafter.serve.tools import forced_tools, strict_tools

if TYPE_CHECKING:
    from redrafter.serve.traces import Traces

_LOG = logging.getLogger(__name__)
MIN_TEMPERATURE = 1e-5  # lower ones would overflow the logits: they mean greedy decoding, as in vLLM
MAX_SCORES = 1 << 18  # log-probabilities of prompts in one answer, which may be 100 MB in memory
MAX_CONTEXTS = 8  # times the context length that a prompt may have to be tokenized
DEFAULT_COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API

AnyRequest = CompletionRequest | ChatRequest
R = TypeVar("R")
T = TypeVar("T")
Facts = dict[str, Any]  # what the log says of a request, by name
Answer = dict[str, Any] | AsyncIterator[dict[str, Any]]  # a whole one, or the parts of a stream


@dataclass
class Server:
    """Answers requests for completions and chats with the texts of an engine."""

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions = field(default_factory=ServeOptions)
    keys: ApiKeys = field(default_factory=ApiKeys)  # clients with keys of their own share no prefixes in the cache
    operators: ApiKeys = field(default_factory=ApiKeys)  # of those who may change the engine; without any, nobody may
    images: ImageReader | str = Prompts.images  # what reads the images of chats, or why none are read
    traces: "Traces | None" = None  # where spans of requests go
    control: ControlTokens | None = Prompts.control  # of the tokenizer and its template, if they are read already
    capture: Capture | None = field(default=None, init=False)  # where texts are written for training

    def __post_init__(self) -> None:
        facts, options = self.engine.facts, self.options
        self.model = options.served_model_name or short_name(facts.model)  # as clients call it
        if self.model in facts.adapters:
            raise ArgumentError(f"--lora-modules has the model's own name {self.model!r}: give the adapter another one")
        self.adapters = dict(facts.adapters)  # directories of those that are served, by name
        self.created = int(time.time())
        if options.capture is not None:
            self.capture = Capture(options, self.tokenizer)
        self._encoding = EncodingThreads()
        self.metrics = Metrics(self.engine, self.model, self.capture)
        self.engine.on_delta = self._observe
        self.prompts = Prompts(
            self.tokenizer,
            self.model,
            facts.vocab_size,
            facts.context,
            options.special_tokens_in_content,
            options.reasoning_parser,
            self.images,
            self.control,
        )

    def _observe(self, sequence: ServedSequence, delta: SequenceDelta) -> None:
        self.metrics.observe(sequence, delta)
        if self.capture is not None:
            self.capture.observe(sequence, delta)

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry of this model, or of an adapter, in a list of models."""
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "redrafter"}
        parent, temperature = self.model if name in self.adapters else None, self.engine.facts.sampling["temperature"]
        return entry | {"max_model_len": self.context, "parent": parent, "default_temperature": temperature}

    @property
    def model_entries(self) -> list[dict[str, Any]]:
        """The list of models: the model itself, then its adapters."""
        return [self.model_entry(name) for name in (self.model, *self.adapters)]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.engine.facts.context

    @cached_property
    def counting_prompts(self) -> Prompts:
        """A reader of prompts that are only tokenized, which may be longer than the context."""
        return self.prompts.with_context(MAX_CONTEXTS * self.context)

    @property
    def thinks(self) -> bool:
        """Tell whether the model writes thoughts."""
        form = call_form(self.options.tool_call_parser, self.prompts.template.text)
        return (form.own_thoughts or self.prompts.thoughts) is not None

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
        except (Stopped, EngineError):
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
        prompts = await self.encode(lambda asked, _: self.prompts.encode_prompts(asked.prompt), request, None, facts)
        copies, kept = request.copies, request.n or 1
        # Of more texts than are asked for, the best ones are chosen by their log-probabilities.
        logprobs = 0 if copies > kept and request.logprobs is None else request.logprobs
        grammar = _grammar_source(request)
        params = self._sampling_params(request, logprobs, request.prompt_count, grammar)
        if len(prompts) * copies > MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts) * copies} texts in one request; at most {MAX_PROMPTS}", "n")
        max_new_tokens = DEFAULT_COMPLETION_TOKENS
        if request.max_tokens is not None:
            max_new_tokens = self._check_room(max(map(len, prompts)), request.max_tokens, "max_tokens")
        choices = []
        for ids in prompts:
            echo = await asyncio.to_thread(decode_tokens, self.tokenizer, ids, True) if request.echo else ""
            choices += [CompletionChoice(ids, *self._served(request, params), echo=echo) for _ in range(copies)]
        asked = Submit([choice.prompt for choice in choices], max_new_tokens, params, grammar)
        return await self._serve(request, asked, choices, facts, (copies, kept))

    async def chat(self, request: ChatRequest, facts: Facts) -> Answer:
        """Answer a request for a chat, as `completion` does."""
        self.check_model(request.model)
        ids, thinking, images = await self.encode(self.prompts.encode_chat, request, request.messages, facts)
        if images is not None and request.prompt_logprobs is not None:
            raise ApiError(400, "the tokens of a prompt with images are not scored: leave it out", "prompt_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        template = self.prompts.template
        # A model whose template ignores tools is asked for JSON objects by a system message.
        form = call_form(self.options.tool_call_parser, template.text if template.reads_tools else "")
        marks = (form.own_thoughts or self.prompts.thoughts) if self.options.reasoning_format == "auto" else None
        content = _grammar_source(request)
        # In a thread, as schemas may be large.
        grammar = await asyncio.to_thread(_chat_grammar, request, content, form, template.unspelled, marks, thinking)
        params = self._sampling_params(request, logprobs, request.prompt_logprobs, grammar)
        choices = [
            ChatChoice(
                ids,
                *self._served(request, params),
                form=form,
                special=template.special,
                thoughts=marks,
                thinking=thinking,
                reads_calls=content is None,
            )
            for _ in range(request.n or 1)
        ]
        max_new_tokens = self.context  # which is cut to the rest of it
        for param in ("max_completion_tokens", "max_tokens"):
            if (count := getattr(request, param)) is not None:
                max_new_tokens = self._check_room(len(ids), count, param)
        asked = Submit([ids] * len(choices), max_new_tokens, params, grammar, images=images)
        return await self._serve(request, asked, choices, facts)

    async def encode(
        self,
        encode: Callable[[R, SandboxedProcess | None], T],
        request: R,
        messages: Sequence[Message] | None,
        facts: Facts,
    ) -> T:
        """Encode a request in a thread, when it is its client's turn.

        `encode` is called with the request and a process that decodes its images, None where it has none.
        """
        client = str(facts.get("client", ""))
        if isinstance(self.images, str) or not any(message.images for message in messages or ()):
            large = facts.get("body_bytes", 0) > SMALL_BODY_BYTES
            return await self._encoding.run(lambda: encode(request, None), client, large)
        return await self.images.run(lambda decoder: encode(request, decoder), client)

    def _check_room(self, prompt: int, asked: int, param: str) -> int:
        """Return the number of tokens asked for, or raise `TooManyTokensError` if the context has no room for them."""
        if prompt + asked > self.context:
            raise TooManyTokensError(prompt, asked, self.context, param)
        return asked

    def _served(self, request: AnyRequest, params: SamplingParams) -> tuple[Any, ...]:
        """Return the arguments of a choice that all texts of a request share."""
        adapter = None if request.model in (None, self.model) else request.model
        return request, self.tokenizer, params.stop_token_ids, self.engine.facts.draft_depth, adapter

    async def _serve(
        self,
        request: AnyRequest,
        asked: Submit,
        choices: list[AnyChoice],
        facts: Facts,
        best: tuple[int, int] = (1, 1),
    ) -> Answer:
        if asked.params.prompt_logprobs is not None:
            scores = (asked.params.prompt_logprobs + 1) * sum(map(len, asked.prompts))
            if scores > MAX_SCORES:
                what = f"{scores} log-probabilities of prompts in one answer; at most {MAX_SCORES}"
                how = "ask for fewer at each place, or for fewer or shorter prompts in a request"
                raise ApiError(400, f"{what}: {how}", "prompt_logprobs")
        if request.priority and self.options.scheduling_policy != "priority":
            why = "Priority scheduling is not enabled"  # vLLM's words, by which clients know that they may leave it out
            how = "leave it out, or start the server with --scheduling-policy priority"
            raise ApiError(400, f"Got priority {request.priority} but {why}: {how}", "priority")
        client, name = str(facts.get("client", "")), request.model or self.model
        owner = client if len(self.keys) > 1 else ""
        salt = json.dumps([owner, request.cache_salt]) if owner or request.cache_salt else None
        # The engine refuses an adapter that was unloaded a moment ago.
        asked = replace(
            asked,
            client=client,
            priority=request.priority,
            cache_salt=salt,
            adapter=choices[0].adapter,
            request_id=str(facts.get("id", "")),
        )
        if self.capture is not None and asked.images is None and self.capture.wants(client):
            for choice in choices:
                choice.recorded = []
        deltas = self.engine.deltas(asked, choices)
        if asked.images is not None and not isinstance(self.images, str):
            deltas = self.images.count(deltas, asked.images, client)
        if self.traces is not None:
            deltas = self.traces.follow(deltas, request, asked, choices, name, str(facts.get("id", "")))
        if not request.stream:
            async with aclosing(deltas):  # or else the engine would go on after an error
                body = await collect_answer(deltas, choices, name, best)
            if isinstance(request, ChatRequest) and (count := request.prompt_logprobs) is not None:
                body["prompt_logprobs"] = await asyncio.to_thread(choices[0].prompt_logprobs, count)
            facts |= summarize(choices)
            return body
        parts = stream_answer(deltas, choices, name, request.stream_options or StreamOptions())
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

    def drain(self) -> None:
        """Accept nothing new; what is being written goes on, and images are decoded no longer."""
        self.engine.drain()
        if isinstance(self.images, ImageReader):
            self.images.close()

    def close(self) -> None:
        """End the engine, whether or not texts are written; write and send what is left of captures and spans."""
        self.engine.stop()
        if self.capture is not None:
            self.capture.close()
        if self.traces is not None:
            self.traces.close()

    def summary(self, url: str) -> list[str]:
        """Return log lines that say what is served, with a command to try it. url: where it is served."""
        what, *more = self.engine.facts.description
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self.keys else ""
        route, asked = "completions", '"prompt": "Once upon a time"'
        if self.tokenizer.chat_template:
            route, asked = "chat/completions", '"messages": [{"role": "user", "content": "Tell me a story."}]'
        body = f'{{"model": "{self.model}", {asked}, "max_tokens": 40}}'
        return [
            f"{self.model}: {what}",
            *more,
            *([] if self.capture is None else [self.capture.describe()]),
            f"ready on {url}; try",
            f"  curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'",
        ]


def load_server(
    process: EngineProcess,
    options: ServeOptions,
    load: LoadOptions,
    keys: ApiKeys,
    operators: ApiKeys | None = None,
) -> Server:
    """Wait until an engine's process has loaded, and return a server of it, whose clients must send a key.

    Those with a key of `operators` may change its engine; None for nobody.
    """
    template = read_template(options.chat_template) if options.chat_template else None
    try:  # while the process loads
        model = load.model or str(boxed_pair())
        tokenizer = load_tokenizer(model, trust_remote_code=load.trust_remote_code)
        find_template(tokenizer, model)
    except ReDrafterError:
        process.wait_until_loaded()  # whose error says more
        raise
    if template is not None:
        tokenizer.chat_template = template
    control = None
    if tokenizer.chat_template:
        control = ControlTokens(tokenizer, ChatTemplate(tokenizer).text)
        control.prepare()
    facts = process.wait_until_loaded()
    images: ImageReader | str = Server.images
    if facts.image_inputs and not options.max_images:
        images = "this server takes no images"
    elif facts.image_inputs:
        try:
            processor = load_processor(facts.model, trust_remote_code=load.trust_remote_code)
            images = ImageReader(processor, facts.image_inputs, options)
        except ReDrafterError as error:
            _LOG.warning("images are refused: %s", error)
            images = "this server is not set up for images"
    traces = None
    if options.otlp_traces_endpoint is not None:
        from redrafter.serve.traces import Traces

        traces = Traces(options.otlp_traces_endpoint)
    engine = EngineClient(process.channel, facts, process)
    return Server(engine, tokenizer, options, keys, operators or ApiKeys(), images, traces, control)


def _grammar_source(request: AnyRequest) -> GrammarSource | None:
    spec: dict[str, Any] | None = None
    if request.structured_outputs is not None:
        [(kind, value)] = ((name, value) for name, value in request.structured_outputs if value is not None)
        spec = {"json_schema" if kind == "json_" else kind: value}
    elif isinstance(request, ChatRequest):
        form = request.response_format
        if form is not None and form.json_schema is not None:
            spec = {"json_schema": form.json_schema.schema_}
        elif form is not None and form.type != "text":
            spec = {"json_object": True} if form.lark_grammar is None else {"lark": form.lark_grammar}
    return None if spec is None else GrammarSource.of(spec)


def _chat_grammar(
    request: ChatRequest,
    grammar: GrammarSource | None,
    form: type[ChatReader],
    special: Mapping[str, int],
    marks: ThoughtMarks | None,
    thinking: Thinking,
) -> GrammarSource | None:
    """Return the grammar of a chat's whole text: of a thought, and of the call or the content that follows it.

    `grammar` is that of the content alone, if it has one.
    """
    lark = LarkWriter(special, form.parsers[0])
    if forced := forced_tools(request):
        return lark.source(form.after_thought(lark, marks, thinking, form.write_forced(lark, forced)))
    if grammar is None and (strict := strict_tools(request)):
        text = form.write_text(lark, strict, several=request.parallel_tool_calls is not False)
        return lark.source(form.after_thought(lark, marks, thinking, text))
    if grammar is None:
        return None
    around = form.after_thought(lark, marks, thinking, form.write_answer(lark, "@answer"))
    return grammar if around == "@answer" else grammar._replace(around=lark.text(around))
