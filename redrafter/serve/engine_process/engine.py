"""A loaded model with its scheduler, and what a server must know of it."""

import logging
from dataclasses import dataclass

from redrafter.app.engines import PLAIN, can_draft, draft_shape
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.engine.draft_target import DraftTarget
from redrafter.engine.engine import Engine
from redrafter.errors import ArgumentError
from redrafter.files.dtype_names import dtype_name
from redrafter.scheduler.cuda_graphs import MOST_ROWS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.loading import EngineFacts, LoadEngine
from redrafter.serve.engine_process.warm_up import warm_up
from redrafter.serve.lora_modules import parse_lora_modules
from redrafter.target.quantization import float8_scheme

__all__ = ["ServedEngine", "load_pair"]

_LOG = logging.getLogger(__name__)
_FLOAT8 = {None: "", "fp8": ", FP8 weights", "fp8_dynamic": ", FP8 weights and activations"}  # in the log


@dataclass(frozen=True)
class ServedEngine:
    """A loaded model and its proposer, with the scheduler that serves them.

    Attributes:
        pair: Model, tokenizer and engine.
        scheduler: A scheduler without sequences.
        facts: What a server must know.
    """

    pair: Pair
    scheduler: Scheduler
    facts: EngineFacts

    @classmethod
    def of(cls, pair: Pair, options: ServeOptions, load: LoadOptions) -> "ServedEngine":
        """Make the scheduler of a loaded pair.

        Args:
            pair: Model, tokenizer and engine.
            options: How much is served at once.
            load: How the model was loaded.
        """
        engine = pair.engine
        if isinstance(engine, DraftTarget) and engine.adaptive:
            raise ArgumentError("a server drafts at one length: leave out --adaptive")
        adapters = parse_lora_modules(options.lora_modules)
        engine.load_adapters(adapters)  # before keys and values take what memory is free
        limits = options.limits(load.max_seq_len)
        min_rows = MOST_ROWS if engine.target.device.type == "cuda" else 1  # a GPU has memory for prefixes too
        graphs = engine.make_graphs(max(limits.max_batch_size, min_rows))
        scheduler = Scheduler(engine, graphs, limits, options.speculate)
        scheme = float8_scheme(engine.model)
        facts = EngineFacts(
            pair.name,
            _describe(pair, scheduler, options),
            engine.target.vocab_size,
            scheduler.longest,
            frozenset(end_tokens(engine.model, pair.tokenizer)),
            _sampling_defaults(engine),
            scheduler.batch.depth,
            limits.reuse,
            engine.target.batch_invariant,
            adapters,
            engine.target.image_inputs if engine.target.images_on_paged.ok else frozenset(),
            scheme is not None,
            scheme == "fp8_dynamic",
            engine.options.kv_cache_dtype,
        )
        return cls(pair, scheduler, facts)

    def warm_up(self) -> None:
        """Compile kernels and capture steps on a GPU, which the first requests would else wait for."""
        if self.pair.engine.target.device.type == "cuda":
            _LOG.info("compiling kernels and capturing steps; --no-warm-up leaves that to the first requests")
            target = self.pair.engine.target
            with target.adapters.holding([None, *target.adapters.names[:1]]) as adapters:  # steps with one serve all
                for adapter in adapters:
                    warm_up(self.scheduler, adapter)


def load_pair(request: LoadEngine) -> Pair:
    """Load a model and its proposer, and warn if there is none."""
    speculate = request.options.speculate and can_draft(request.load, request.draft)
    if request.options.speculate and not speculate:
        _LOG.warning(
            "%s comes without a drafter, so texts are written plainly: --drafter D, --draft-model D or --prompt-lookup "
            "makes it faster",
            request.load.model,
        )
    return Pair.load(request.load, request.draft, speculate)


def _describe(pair: Pair, scheduler: Scheduler, options: ServeOptions) -> tuple[str, ...]:
    """Return log lines that say what is served."""
    target = pair.engine.target
    proposer = pair.engine.proposer_for(1) if options.speculate else None
    drafts = "no drafts"
    if proposer is not None and pair.method != PLAIN:
        drafts = f"{pair.method}, {draft_shape(proposer) or 'no drafts at one row'}"
    weights = _FLOAT8[float8_scheme(target.model)]
    invariant = ", batch-invariant" if target.batch_invariant else ""
    host = scheduler.graphs.host
    on_host = "" if host is None else f", and {(host.num_blocks - 1) * 16:,} more on the host"
    kv_dtype = pair.engine.options.kv_cache_dtype
    stored = "" if kv_dtype == "auto" else f" in {kv_dtype}"
    names = ", ".join(target.adapters.names)
    adapters = (f"adapters: {names}",) if names else ()
    return (
        f"{target.name}, {dtype_name(target.dtype)} on {target.device}{weights}{invariant}; {drafts}",
        *adapters,
        f"up to {options.max_batch_size} texts at once, of up to {scheduler.longest} tokens; "
        f"{scheduler.graphs.blocks.num_blocks * 16:,} tokens of keys and values{stored}{on_host}",
    )


def _sampling_defaults(engine: Engine) -> dict[str, float]:
    """Return the parameters of the model's generation config, and where that is silent, OpenAI's defaults."""
    config = engine.model.generation_config
    plain = 0.0 if engine.do_sample is False else 1.0
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    configured = {name: getattr(config, name, None) for name in neutral}
    defaults = {name: neutral[name] if value is None else value for name, value in configured.items()}
    return {"temperature": config.temperature or plain} | defaults
