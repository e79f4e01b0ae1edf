"""Load a model with its scheduler for a server, describe it, and warm it up."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.engine.engine import Engine
from redrafter.errors import ArgumentError
from redrafter.features import BATCH_INVARIANCE
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.record import UNDRAFTED
from redrafter.model.quantized_layers import quantized_form
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.paged_memory import MOST_ROWS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.config import ServeOptions, parse_lora_modules
from redrafter.serve.engine_process.start import EngineFacts, LoadEngine
from redrafter.serve.engine_process.warm_up import warm_up

_LOG = logging.getLogger(__name__)


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
        target, ends = engine.target, end_tokens(engine.model, pair.tokenizer)
        known = frozenset(token for token in ends if token < target.vocab_size)
        images = target.image_inputs if target.images.support_on(paged=True).ok else frozenset[str]()
        how = _sampling_defaults(engine), limits.reuse, adapters, images
        facts = EngineFacts(pair.name, _describe(pair, scheduler, options), scheduler.bounds, known, *how)
        return cls(pair, scheduler, facts)

    def warm_up(self) -> None:
        """Compile kernels and capture steps on a GPU, the most used ones now and the others while no request waits."""
        if self.pair.engine.target.device.type == "cuda":
            _LOG.info("compiling kernels and capturing steps; --no-warm-up leaves that to the first requests")
            warm_up(self.scheduler, SamplingParams(**_sampling_defaults(self.pair.engine)))


def _describe(pair: Pair, scheduler: Scheduler, options: ServeOptions) -> tuple[str, ...]:
    target = pair.engine.target
    proposer = pair.engine.proposer_for(1) if options.speculate else None
    drafts = "no drafts"
    if proposer is not None and pair.method != UNDRAFTED:
        drafts = f"{pair.method}, {proposer.sizes or 'no drafts at one row'}"
    form = quantized_form(target.model)
    weights = "" if form is None else f", {form}"
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
