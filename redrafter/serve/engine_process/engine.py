"""Load a model with its scheduler for a server, describe it, and warm it up."""

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.policy import MANY_ROWS, DraftPolicy
from redrafter.engine.engine import Engine
from redrafter.errors import ArgumentError
from redrafter.features import ADAPTIVE_DRAFTS, BATCH_INVARIANCE, SERVING, FeatureSet
from redrafter.files.dtype_names import dtype_name
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK
from redrafter.measure.record import UNDRAFTED
from redrafter.model.linear_layers import has_float8_layers
from redrafter.model.lora import Adapter
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.paged_memory import MOST_ROWS
from redrafter.scheduler.prefill import ROOMS_ALONE, rooms_of
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.running_batch import MIN_POSITIONS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.config import ServeOptions, parse_lora_modules
from redrafter.serve.engine_process.start import EngineFacts, LoadEngine

_LOG = logging.getLogger(__name__)
PROMPT_TOKENS = (1, 5, 17, 40, 100, 200, 500, 1000)  # prompt lengths that select different kernels
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams()
PENALISED, TOP_P = SamplingParams(presence_penalty=0.1), SamplingParams(top_p=0.9)
# Sampling kinds whose steps are not captured for every number of rows.
RARE = (replace(PENALISED, temperature=0), PENALISED, TOP_P, replace(PENALISED, top_p=0.9))


@dataclass(frozen=True)
class ServedEngine:
    """A loaded model and its proposer, the scheduler that serves them, and their facts for the server."""

    pair: Pair
    scheduler: Scheduler
    facts: EngineFacts

    @classmethod
    def load(cls, request: LoadEngine) -> "ServedEngine":
        """Load a model and its proposer, and warm the engine up as the options say."""
        began, options = time.monotonic(), request.options
        pair = Pair.load(request.load, request.draft, options.speculate)
        _LOG.info("loaded %s in %.1f s", pair.name, time.monotonic() - began)
        engine = cls.from_pair(pair, options, request.load)
        if options.warm_up:
            engine.warm_up()
        return engine

    @classmethod
    def from_pair(cls, pair: Pair, options: ServeOptions, load: LoadOptions) -> "ServedEngine":
        """Build the scheduler for a pair loaded with these options."""
        engine = pair.engine
        if engine.adaptive:
            FeatureSet("redrafter serve", ADAPTIVE_DRAFTS).check(SERVING)
        adapters = parse_lora_modules(options.lora_modules)
        engine.load_adapters(adapters)  # before the KV cache takes the free memory
        limits = options.limits(load.max_seq_len, load.max_input_len)
        min_rows = MOST_ROWS if engine.target.device.type == "cuda" else 1  # a GPU also has memory for prefixes
        memory = engine.make_memory(max(limits.max_batch_size, min_rows), reuse=limits.reuse)
        scheduler = Scheduler(engine, memory, limits, options.speculate)
        if load.max_seq_len is not None and scheduler.longest < load.max_seq_len:
            raise ArgumentError(
                f"--max-seq-len {load.max_seq_len} is more than the memory of keys and values holds: give "
                f"{scheduler.longest} at most, or a larger --kv-cache-free-gpu-memory-fraction"
            )
        facts = EngineFacts(
            pair.name,
            _describe(pair, scheduler, options),
            scheduler.bounds,
            frozenset(token for token in end_tokens(engine.model, pair.tokenizer) if token < engine.target.vocab_size),
            _sampling_defaults(engine),
            limits.reuse,
            adapters,
            engine.target.image_inputs if engine.target.images.support_on(paged=True).ok else frozenset(),
        )
        return cls(pair, scheduler, facts)

    def warm_up(self) -> None:
        """Compile kernels and capture steps on a GPU, so that the first requests do not wait for that."""
        if self.pair.engine.target.device.type == "cuda":
            _LOG.info("compiling kernels and capturing steps; --no-warm-up leaves that to the first requests")
            adapters = self.pair.engine.target.adapters
            with adapters.holding([None, *adapters.names[:1]]) as held:  # a step captured with one adapter serves all
                for adapter in held:
                    warm_up(self.scheduler, adapter)


def _describe(pair: Pair, scheduler: Scheduler, options: ServeOptions) -> tuple[str, ...]:
    target = pair.engine.target
    proposer = pair.engine.proposer_for(1) if options.speculate else None
    drafts = "no drafts"
    if proposer is not None and pair.method != UNDRAFTED:
        drafts = f"{pair.method}, {proposer.sizes or 'no drafts at one row'}"
    weights = ", FP8 weights" if has_float8_layers(target.model) else ""
    invariant = ", batch-invariant" if BATCH_INVARIANCE in target.features else ""
    host = scheduler.memory.host
    on_host = "" if host is None else f", and {(host.num_blocks - 1) * 16:,} more on the host"
    kv_dtype = pair.engine.options.kv_cache_dtype
    stored = "" if kv_dtype == "auto" else f" in {kv_dtype}"
    names = ", ".join(target.adapters.names)
    adapters = (f"adapters: {names}",) if names else ()
    return (
        f"{target.name}, {dtype_name(target.dtype)} on {target.device}{weights}{invariant}; {drafts}",
        *adapters,
        f"up to {options.max_batch_size} sequences at once, of up to {scheduler.longest} tokens; "
        f"{scheduler.memory.blocks.num_blocks * 16:,} tokens of keys and values{stored}{on_host}",
    )


def _sampling_defaults(engine: Engine) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation config, with OpenAI's defaults for the rest."""
    config = engine.model.generation_config
    if engine.samples_by_default is False:
        temperature = 0.0
    else:
        temperature = 1.0 if config.temperature is None else config.temperature
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    configured = {name: getattr(config, name, None) for name in neutral}
    defaults = {name: neutral[name] if value is None else value for name, value in configured.items()}
    return {"temperature": temperature} | defaults


def warm_up(scheduler: Scheduler, adapter: Adapter | None = None) -> None:
    """Decode sequences without a client: prompts of many lengths, and steps of every batch size.

    For each batch size, these take the likeliest token, sample, or draw with the model's defaults. The first rows with
    other sampling kinds wait for their own captures, as do the first that reach `MIN_POSITIONS` and each power of two
    above it: capturing one step takes a tenth of a second, and capturing all kinds was half of the startup time. The
    scheduler must have no sequences; all of the warm-up's have the same adapter, or none.
    """
    began = time.monotonic()
    most, policy = scheduler.limits.max_batch_size, scheduler.batch.policy
    # A policy that never pauses, so that all drafted steps are captured.
    scheduler.batch.policy = DraftPolicy({size: policy.first(size) for size in scheduler.batch.sizes})
    longest = min(scheduler.longest, MIN_POSITIONS[scheduler.engine.target.device.type]) - scheduler.batch.overshoot - 2
    longest = min(longest, scheduler.bounds.longest_prompt + 1)
    mixed = scheduler.mixed_prefill

    def lengths_for(rooms: Sequence[int]) -> list[int]:
        """Return the shortest prompt that needs each of these buffers."""
        return [1 + room * TOKENS_PER_CHUNK for room in (0, *rooms[:-1])] if mixed else []

    scheduler.batch.reserve(scheduler.longest)  # a later growth of buffers would discard captured steps

    def submit(prompt: list[int], count: int, params: SamplingParams, salt: str | None = None) -> TokenSequence:
        request = GenerationRequest(prompt, count, params, cache_salt=salt, adapter=adapter)
        sequence = TokenSequence(request, lambda *_: None)
        scheduler.submit(sequence)
        return sequence

    def finish() -> None:
        while not scheduler.idle:
            scheduler.round()

    def write(rows: int, length: int, kind: Sequence[SamplingParams]) -> None:
        """Decode two tokens after each of some prompts: one by prefill, one by a step."""
        for row in range(rows):
            submit([1 + row % 7] * length, 2, kind[row > 0])
        finish()

    # Rows that decode until cancelled, so that each prefill is merged with their steps.
    def prefill_mixed(rows: int, kind: Sequence[SamplingParams]) -> None:
        """Prefill a prompt for each size of buffers, one after the other, in steps with `rows` rows."""
        for row in range(rows):
            submit([1], scheduler.longest - 1, kind[row > 0])
        while scheduler.running_set.waiting or len(scheduler.batch.rows) < rows:
            scheduler.round()
        for length in lengths_for(rooms_of(rows, scheduler.batch.step_nodes)):
            # A unique salt keeps the cache from shortening the prefill.
            read = submit([1] * min(length, longest - 1), 1, kind[0], f"{rows} {length} {kind}")
            while not read.ended and scheduler.batch.rows:
                scheduler.round()
        scheduler.cancel_all()
        finish()

    engine, sizes = scheduler.engine, scheduler.batch.sizes
    assert isinstance(engine, Engine), "what is served is an engine"
    usual = SamplingParams(**_sampling_defaults(engine))
    frequent = [(GREEDY, GREEDY), (SAMPLED, SAMPLED)]  # sampling of the first row, and of the others
    if usual.cuts or usual.edits:
        frequent += [(usual, usual), (usual, GREEDY)]
    # A single row loads all kernels that more rows need.
    for rows, kind in [*itertools.product(sizes, frequent), *((1, (params,)) for params in RARE)]:
        decoding = min(rows, most - 1)
        for limit in (None, 0):
            limited = [replace(each, num_speculative_tokens=limit) for each in kind]
            write(min(rows, most), 1, limited)
            # While a large batch reads prompts, drafts may cost more than they gain: without drafts it also reads them.
            if decoding and mixed and (limit is None or rows >= MANY_ROWS):
                prefill_mixed(decoding, limited)
    for length in sorted({*PROMPT_TOKENS, *lengths_for(ROOMS_ALONE)}):
        if length < longest:
            write(1, length, frequent[0])
            write(min(2, most), length, frequent[0])
    _LOG.info("captured %d steps in %.1f s", len(scheduler.batch.captured_steps), time.monotonic() - began)
    scheduler.batch.policy = policy
    # Clients must not see hits on the prompts above.
    scheduler.memory.forget_prefixes()
    scheduler.prefiller.restart_pace()  # compilation makes these durations unrepresentative
