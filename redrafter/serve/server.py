"""Answer OpenAI's requests: submit them to the engine as sequences, and format the results."""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.options import LoadOptions
from redrafter.app.templates import load_chat_tokenizer
from redrafter.chat.control_tokens import control_tokens_of
from redrafter.chat.template import chat_template_of
from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.checkpoints.chat_templates import read_template
from redrafter.checkpoints.merged import boxed_pair
from redrafter.checkpoints.tokenizers import load_processor
from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import ArgumentError, CheckpointError, ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import NEUTRAL, NUMBERS, SamplingParams
from redrafter.sampling.processors import MAX_BEGIN_TOKENS, ThinkingBudget
from redrafter.sandbox.process import SandboxedProcess
from redrafter.scheduler.request import check_draft_limit, check_token_ids
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers import formats
from redrafter.serve.answers.call_forms import call_form
from redrafter.serve.answers.choice import ChoiceContext, summarize
from redrafter.serve.capture import Capture
from redrafter.serve.config import ServeOptions
from redrafter.serve.encoding import LONG_TEXT, EncodingThreads
from redrafter.serve.engine_process.client import EngineClient, ServedSequence, Stopped
from redrafter.serve.engine_process.messages import EngineError, Submit
from redrafter.serve.engine_process.start import EngineProcess
from redrafter.serve.images import ChatImageReader
from redrafter.serve.metrics import Metrics
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys
from redrafter.serve.prompts import EncodedChat, PromptEncoder
from redrafter.serve.protocol import requests
from redrafter.serve.protocol.fields import MAX_PROMPTS, SMALL_BODY_BYTES, StreamOptions
from redrafter.serve.request_grammar import chat_grammar, content_grammar

if TYPE_CHECKING:
    from redrafter.serve.traces import Traces

_LOG = logging.getLogger(__name__)
MIN_TEMPERATURE = 1e-5  # lower values would overflow the logits, and mean greedy decoding, as in vLLM
MAX_SCORES = 1 << 18  # log-probabilities of prompts in one answer, which may take 100 MB of memory
MAX_CONTEXTS = 8  # largest prompt to tokenize, in context lengths
# A request with such a body is encoded in 1 to 5 ms. Threads wait for the GIL of a busy event loop, and for each other
# where one client sends many requests: with 64 streams, for 40 ms.
SHORT_BODY_BYTES = 1 << 12
DEFAULT_COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API

AnyRequest = requests.CompletionRequest | requests.ChatRequest
T = TypeVar("T")
Facts = dict[str, Any]  # facts to log about a request, by name
Answer = dict[str, Any] | AsyncIterator[dict[str, Any]]  # a whole answer, or the chunks of a stream


@dataclass
class Server:
    """Answers requests for completions and chats with an engine's output."""

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions = field(default_factory=ServeOptions)
    keys: ApiKeys = field(default_factory=ApiKeys)  # clients with different keys share no cached prefixes
    operators: ApiKeys = field(default_factory=ApiKeys)  # keys of operators; if empty, nobody may change the engine
    images: ChatImageReader | str = PromptEncoder.images  # reader of chats' images, or the reason why none are accepted
    traces: "Traces | None" = None  # exporter of requests' spans
    capture: Capture | None = field(default=None, init=False)  # stores sequences for training

    def __post_init__(self) -> None:
        facts, options = self.engine.facts, self.options
        self.model = options.served_model_name or short_name(facts.model)  # name of the model for clients
        if self.model in facts.adapters:
            raise ArgumentError(f"--lora-modules has the model's own name {self.model!r}: give the adapter another one")
        self.adapters = dict(facts.adapters)  # directories of the served adapters, by name
        self.created = int(time.time())
        if options.capture is not None:
            self.capture = Capture(options, self.tokenizer)
        self._encoding = EncodingThreads()
        self.metrics = Metrics(self.engine, self.model, self.capture)
        self.engine.on_delta = self._observe
        how = options.special_tokens_in_content, options.reasoning_parser
        self.prompts = PromptEncoder(self.tokenizer, self.model, facts.bounds, *how, self.images)

    def _observe(self, sequence: ServedSequence, delta: SequenceDelta) -> None:
        self.metrics.observe(sequence, delta)
        if self.capture is not None:
            self.capture.observe(sequence, delta)

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry of the model or of an adapter in the list of models."""
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
        return self.engine.facts.bounds.max_seq_len

    @cached_property
    def counting_prompts(self) -> PromptEncoder:
        """Encoder of prompts that are only tokenized, which may exceed the context."""
        return self.prompts.with_context(MAX_CONTEXTS * self.context)

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts."""
        return self.thought_marks is not None

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """The marks around the model's thoughts, in its form of tool calls or its template; None without thoughts."""
        form = call_form(self.options.tool_call_parser, self.prompts.template.text)
        return form.own_thoughts or self.prompts.thoughts

    def thinking_budget(self, tokens: int, thinking: Thinking = "possible") -> ThinkingBudget | None:
        """Return the budget of an answer's first thought; None where it has none, or none that a token ends.

        `thinking` says how the prompt ends, as `PromptEncoder.encode_chat` returns it.
        """
        marks = self.thought_marks
        if marks is None:
            return None
        begin, end = (self.tokenizer.encode(text, add_special_tokens=False) for text in (marks.begin, marks.end))
        # A mark that is no token of its own may be written in other tokens than those of the mark alone.
        if len(end) != 1 or end[0] not in self.tokenizer.added_tokens_decoder or len(begin) > MAX_BEGIN_TOKENS:
            return None
        return ThinkingBudget(tokens, end[0], () if thinking == "open" else tuple(begin))

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless `name` is the model, an adapter, or None for the model."""
        if name is None or name == self.model or name in self.adapters:
            return
        adapters = f", and so are its adapters {', '.join(map(repr, self.adapters))}" if self.adapters else ""
        message = f"the model {name!r} is not served here; {self.model!r} is{adapters}"
        raise requests.ApiError(404, message, "model", "model_not_found")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a local directory, and serve it as a model of this name, or raise `ApiError`.

        The error is the same for all paths without an adapter, so that clients do not learn which paths exist.
        """
        if name in self.adapters or name == self.model:
            raise requests.ApiError(400, f"The lora adapter '{name}' has already been loaded.", "lora_name")
        try:
            # In a thread, since the path may be on a network file system.
            if not await asyncio.to_thread(os.path.isdir, path):
                raise CheckpointError(f"{path} is not a directory")
            await self.engine.change_adapters(name, path)
        except CheckpointError as error:
            _LOG.warning("no adapter is loaded: %s", error)
            raise requests.ApiError(
                404, f"No adapter found for '{path}': the server's log has the reason", "lora_path"
            ) from None
        except (Stopped, EngineError):
            raise
        except ReDrafterError as error:
            raise requests.ApiError(400, str(error), "lora_path") from error
        # Listed only once the engine has it.
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Stop serving a LoRA adapter, or raise `ApiError` if it does not exist. Its running sequences continue."""
        if name not in self.adapters:
            raise requests.ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        del self.adapters[name]
        await self.engine.change_adapters(name, None)

    async def completion(self, request: requests.CompletionRequest, facts: Facts) -> Answer:
        """Answer a completion request, and add to the facts to log about it."""
        self.check_model(request.model)
        prompts = await self.encode(
            lambda _: self.prompts.encode_prompts(request.prompt, request.add_special_tokens), None, facts
        )
        copies, grammar = request.n or 1, content_grammar(request)
        params = self._sampling_params(request, request.logprobs, grammar)
        if request.echo:  # the prompt's tokens are scored too
            params = replace(params, prompt_logprobs=request.logprobs)
        if len(prompts) * copies > MAX_PROMPTS:
            raise requests.ApiError(400, f"{len(prompts) * copies} texts in one request; at most {MAX_PROMPTS}", "n")
        max_new_tokens = DEFAULT_COMPLETION_TOKENS
        if request.max_tokens is not None:
            max_new_tokens = self._check_room(max(map(len, prompts)), request.max_tokens, "max_tokens")
        choices, context = [], self._context(request, params)
        for ids in prompts:
            echo = await asyncio.to_thread(decode_tokens, self.tokenizer, ids, True) if request.echo else ""
            choices += [formats.CompletionChoice(ids, request, context, echo) for _ in range(copies)]
        asked = Submit([choice.prompt for choice in choices], max_new_tokens, params, grammar)
        return await self._serve(request, asked, choices, facts)

    async def chat(self, request: requests.ChatRequest, facts: Facts) -> Answer:
        """Answer a chat request, and add to the facts to log about it."""
        self.check_model(request.model)
        template = self.prompts.template
        # If the template ignores tools, a system message asks the model for calls as JSON objects.
        form = call_form(self.options.tool_call_parser, template.text if template.reads_tools else "")
        marks = (form.own_thoughts or self.prompts.thoughts) if self.options.reasoning_format == "auto" else None

        def encode(decoder: SandboxedProcess | None) -> tuple[EncodedChat, bool, GrammarSource | None]:
            encoded, content = self.prompts.encode_chat(request, decoder), content_grammar(request)
            grammar = chat_grammar(request, content, form, template.unspelled, marks, encoded.thinking)
            return encoded, content is None, grammar

        encoded, reads_calls, grammar = await self.encode(encode, request.messages, facts)
        ids, thinking, images = encoded
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        budget: ThinkingBudget | None = None
        if request.thinking_token_budget is not None:
            budget = self.thinking_budget(request.thinking_token_budget, thinking)
            if budget is None:
                what = "this model writes no thoughts that end with a token of their own: leave it out"
                raise requests.ApiError(400, what, "thinking_token_budget", "unsupported_parameter")
        params = self._sampling_params(request, logprobs, grammar)
        params = replace(params, thinking=None if thinking == "over" else budget)
        context = self._context(request, params)
        choices = [
            formats.ChatChoice(ids, request, context, form, template.special, marks, thinking, reads_calls)
            for _ in range(request.n or 1)
        ]
        max_new_tokens = self.context  # later limited to the rest of the context
        for param in ("max_completion_tokens", "max_tokens"):
            if (count := getattr(request, param)) is not None:
                max_new_tokens = self._check_room(len(ids), count, param)
        asked = Submit([ids] * len(choices), max_new_tokens, params, grammar, images=images)
        return await self._serve(request, asked, choices, facts)

    async def encode(
        self, encode: Callable[[SandboxedProcess | None], T], messages: Sequence[requests.Message] | None, facts: Facts
    ) -> T:
        """Encode a request in a thread, when it is its client's turn, or at once if it is short and the loop rested.

        `encode` is called with a process that decodes the images of the request's messages; None without images.
        """
        client = str(facts.get("client", ""))
        if isinstance(self.images, str) or not any(message.images for message in messages or ()):
            # A template may have a long text of its own, which it adds to the messages.
            added = len(self.prompts.template.text) if messages else 0
            size = facts.get("body_bytes", SMALL_BODY_BYTES)
            if size <= SHORT_BODY_BYTES and size + added <= LONG_TEXT and self._encoding.may_run_here:
                return self._encoding.run_here(lambda: encode(None))
            return await self._encoding.run_encoding(lambda: encode(None), client, size > SMALL_BODY_BYTES)
        return await self.images.run_encoding(encode, client)

    def _check_room(self, prompt: int, asked: int, param: str) -> int:
        """Return the number of tokens asked for, or raise `TooManyTokensError` if the context has no room for them."""
        if prompt + asked > self.context:
            raise requests.TooManyTokensError(prompt, asked, self.context, param)
        return asked

    def _context(self, request: AnyRequest, params: SamplingParams) -> ChoiceContext:
        adapter = None if request.model in (None, self.model) else request.model
        return ChoiceContext(self.tokenizer, params.stop_token_ids, self.engine.facts.bounds.draft_depth, adapter)

    async def _serve(
        self, request: AnyRequest, asked: Submit, choices: list[formats.AnyChoice], facts: Facts
    ) -> Answer:
        if asked.params.prompt_logprobs is not None:
            scores = (asked.params.prompt_logprobs + 1) * sum(map(len, asked.prompts))
            if scores > MAX_SCORES:
                what = f"{scores} log-probabilities of prompts in one answer; at most {MAX_SCORES}"
                how = "ask for fewer at each place, or for fewer or shorter prompts in a request"
                raise requests.ApiError(400, f"{what}: {how}", "logprobs")
        if request.priority and self.options.scheduling_policy != "priority":
            why = "Priority scheduling is not enabled"  # vLLM's wording: clients then omit the priority
            how = "leave it out, or start the server with --scheduling-policy priority"
            raise requests.ApiError(400, f"Got priority {request.priority} but {why}: {how}", "priority")
        client, name = str(facts.get("client", "")), request.model or self.model
        # With several keys, clients do not share cached prefixes: timing would reveal other clients' prompts.
        owner = client if len(self.keys) > 1 else ""
        salt = json.dumps([owner, request.cache_salt]) if owner or request.cache_salt else None
        # The engine itself rejects an adapter that is unloaded after this check.
        about: dict[str, Any] = {"priority": request.priority, "cache_salt": salt, "adapter": choices[0].adapter}
        asked = replace(asked, client=client, request_id=str(facts.get("id", "")), **about)
        if self.capture is not None and asked.images is None and self.capture.wants(client):
            for choice in choices:
                choice.recorded = []
        deltas = self.engine.deltas(asked, choices)
        if asked.images is not None and not isinstance(self.images, str):
            deltas = self.images.count(deltas, asked.images, client)
        if self.traces is not None:
            from redrafter.serve.traces import follow

            deltas = follow(deltas, asked, choices, name)
        if not request.stream:
            async with aclosing(deltas):  # otherwise the engine would continue after an error
                body = await formats.collect_answer(deltas, choices, name)
            facts |= summarize(choices)
            return body
        parts = formats.stream_answer(deltas, choices, name, request.stream_options or StreamOptions())
        try:
            first = await anext(parts)  # so that a rejection gets an HTTP status, not an event in a stream
        except BaseException:
            await deltas.aclose()
            raise

        async def all_parts() -> AsyncIterator[dict[str, Any]]:
            unfinished = "left"
            try:
                yield first
                async for part in parts:
                    yield part
            except Exception as error:  # headers are sent by now, so it can only be a last event in the stream
                unfinished = "error"
                raise formats.error_of_cut(error) from None
            finally:
                await parts.aclose()  # type: ignore[attr-defined]
                await deltas.aclose()
                facts.update(summarize(choices, unfinished))

        return all_parts()

    def _sampling_params(
        self, request: AnyRequest, logprobs: int | None, grammar: GrammarSource | None
    ) -> SamplingParams:
        """Return the sampling parameters of a request without its grammar; the engine's defaults fill gaps."""
        facts = self.engine.facts

        def pick(name: str) -> Any:
            asked = getattr(request, name)
            return facts.sampling.get(name, getattr(NEUTRAL, name)) if asked is None else asked

        temperature = pick("temperature")
        if grammar is not None and request.ignore_eos:
            raise requests.ApiError(
                400, "a text that follows a grammar ends with it: leave out ignore_eos", "ignore_eos"
            )
        bias = {}
        for token, value in (request.logit_bias or {}).items():
            if not (token.isdecimal() and len(token) < 20):
                raise requests.ApiError(400, f"logit_bias names {token!r}, which is not a token id", "logit_bias")
            bias[int(token)] = value
        with requests.blaming("logit_bias"):
            check_token_ids(bias, facts.bounds.vocab_size)
        with requests.blaming("num_speculative_tokens"):
            check_draft_limit(request.num_speculative_tokens, facts.bounds.draft_depth)
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
            num_speculative_tokens=request.num_speculative_tokens if request.speculate else 0,
        )

    def drain(self) -> None:
        """Reject new requests and stop decoding images; running sequences continue."""
        self.engine.drain()
        if isinstance(self.images, ChatImageReader):
            self.images.close()

    def close(self) -> None:
        """Flush captures and spans, and end the engine, even if sequences are running."""
        if self.capture is not None:
            self.capture.close()
        # Before the engine, whose process may take seconds to end.
        if self.traces is not None:
            self.traces.close()
        self.engine.stop()

    def summary(self, url: str) -> list[str]:
        """Return log lines that describe the server at `url`, with a command to try it."""
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
    process: EngineProcess, options: ServeOptions, load: LoadOptions, keys: ApiKeys, operators: ApiKeys | None = None
) -> Server:
    """Wait until an engine's process has loaded, and return its server, whose clients must send one of `keys`.

    Callers with a key of `operators` may change the engine; with None, nobody may.
    """
    if load.chat_template is not None:
        read_template(load.chat_template)  # a wrong one is reported without waiting
    try:  # overlaps with the process's loading
        model = load.model or str(boxed_pair())
        tokenizer = load_chat_tokenizer(model, load, trust_remote_code=load.trust_remote_code)
    except ReDrafterError:
        process.wait_until_loaded()  # an error of loading is more informative
        raise
    if tokenizer.chat_template:
        control_tokens_of(chat_template_of(tokenizer)).prepare()
    # Everything that does not need the engine is prepared while it loads.
    facts = process.wait_until_loaded()
    images: ChatImageReader | str = Server.images
    if facts.image_inputs and not options.max_images:
        images = "this server takes no images"
    elif facts.image_inputs:
        try:
            processor = load_processor(facts.model, trust_remote_code=load.trust_remote_code)
            images = ChatImageReader(processor, facts.image_inputs, options)
        except ReDrafterError as error:
            _LOG.warning("images are refused: %s", error)
            images = "this server is not set up for images"
    traces = None
    if options.otlp_traces_endpoint is not None:
        from redrafter.serve.traces import Traces

        traces = Traces(options.otlp_traces_endpoint)
    engine = EngineClient(process.channel, facts, process)
    return Server(engine, tokenizer, options, keys, operators or ApiKeys(), images, traces)
