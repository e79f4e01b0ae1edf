"""The engine: `generate` with Hugging Face's interface, over a target and a proposer."""

import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from redrafter.cache.to_device import made_on_host
from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.policy import AcceptanceHistory, DraftPolicy, text_nodes
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.proposer import UNDRAFTED, Proposer, SearchProposer
from redrafter.drafting.step_times import SHARED_EVERY, StepCosts, StepTimes
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.engine.arguments import (
    AdapterNames,
    DraftLimits,
    OwnArguments,
    PreparedCall,
    Seed,
    check_shapes,
    prepare_call,
)
from redrafter.engine.async_calls import AsyncCalls
from redrafter.engine.call import GenerateCall, GenerateOutput
from redrafter.engine.changes import Changeable
from redrafter.engine.idle_batches import IdleBatches
from redrafter.engine.modes import set_modes
from redrafter.engine.options import EngineOptions
from redrafter.engine.request import CallRequest, read_request, row_adapters
from redrafter.engine.streamers import ColumnStream, StepStreamer, takes_columns
from redrafter.errors import ArgumentError, UnsupportedError, warn
from redrafter.features import ASYNC_CALLS, RECURRENT_STATES
from redrafter.files.dtype_names import dtype_name
from redrafter.model.forward_batch import LogitsReader
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.quantized_layers import GroupedLinear, quantized_layers
from redrafter.model.supported import check_autocast
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import bucket
from redrafter.scheduler.engine_change import Models
from redrafter.scheduler.paged_memory import MOST_ROWS, PagedMemory
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import Limits

Streamer = BaseStreamer | StepStreamer


class Engine(Changeable):
    """A target and the proposer that drafts for it. Threads may share an engine.

    Between requests it keeps only what makes the next one faster: on a GPU the captured steps, and keys and values of
    prefixes that a later prompt may share.

    Attributes:
        target: The bound model to generate with.
        proposer: Its proposer, for one row.
        options: Limits of memory and lengths; None in the constructor for the defaults.
        undrafted: The proposer that drafts nothing.
        draft_model: The model that drafts, or None.
        memory: The paged memory, from the first request on a GPU on; None before.
        batches: Running batches of earlier requests, with their captured steps.
        do_sample: Whether `generate` samples where neither a call nor a `generation_config` sets it; None for the
            model's own default.
        drafter: The drafter that was trained for the target; None if another model, or none, drafts.
        previous_drafter: The weights of the drafter before the last `change_drafter`; None before the first.
        draft_vocabulary: The draft model's tokens for each of the target's; None where its ids are the target's.
        rejection_sampling: Whether drafts are accepted by rejection sampling; sampled tokens then differ from undrafted
            decoding.
        adaptive: Whether a step drafts only as many tokens as the acceptance of recent drafts makes pay.
        pauses: Whether steps leave out drafts that gain less than they cost. It changes no token.
        clock: Clock of the calling thread that times steps on a CPU; None to time none. It changes no token.
        step_times: Measured times of steps; None before the first call that drafts.
        histories: The acceptance of earlier drafts, of greedy steps and of sampled ones, since the models last changed.
    """

    pauses = True
    clock: Callable[[], float] | None = staticmethod(time.thread_time)
    do_sample: bool | None = None
    draft_vocabulary: VocabularyMap | None = None
    rejection_sampling = False
    adaptive = False

    def __init__(self, target: Target, proposer: Proposer, options: EngineOptions | None = None):
        self._check_bound(target, Target)
        self.target = target
        super().__init__()
        self.proposer, self.options = proposer, options or EngineOptions()
        self.options.check_lengths(target.context)
        set_modes(target, proposer.model, self.options)
        self.undrafted: Proposer = UNDRAFTED
        self.draft_model = proposer.model
        self.memory: PagedMemory | None = None
        self.batches = IdleBatches()
        self.lender: Engine | None = None  # the engine whose memory is used in place of its own
        self._warned = False
        self.step_times: StepTimes | None = None  # of steps by `StepCosts`, once there were some
        self.histories = {sampled: AcceptanceHistory() for sampled in (False, True)}
        self._measured: StepCosts | None = None  # where steps were measured before the first call
        self._with_text: dict[tuple[int, int], WithPromptLookup] = {}
        self._lock = threading.Lock()  # so that of two concurrent first requests only one allocates the memory

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be pickled or copied: it holds locks and memory of the device; make one "
            "in each process with from_pretrained"
        )

    def __repr__(self) -> str:
        """Describe the target, its dtype and device, and the sizes of the proposer's tree."""
        target, sizes = self.target, self.proposer.sizes or {}
        parts = [target.name, dtype_name(target.dtype), target.device, *(f"{name}={sizes[name]}" for name in sizes)]
        return f"{type(self).__name__}({', '.join(map(str, parts))})"

    def _check_bound(self, given: object, kind: Any) -> None:
        """Refuse a part that the constructor does not take and `from_pretrained` may."""
        if not isinstance(given, kind):
            raise ArgumentError(
                f"{type(self).__name__}() takes parts that are loaded and bound, not {given!r:.40}; "
                "from_pretrained takes names, directories and models of transformers"
            )

    def derive(self) -> None:
        """Forget the acceptance of drafts too, which other weights change."""
        super().derive()
        self.histories = {sampled: AcceptanceHistory() for sampled in (False, True)}

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows."""
        return self.proposer

    def _with_copies(self, proposer: Proposer, rows: int) -> Proposer:
        """Return a proposer that also copies from the text, or the same one where copying is off or costly."""
        # Recurrent layers are called once for each level, and a chain adds as many levels as it has drafts: on a GPU in
        # every step, on a CPU only where the text has a match.
        costly = RECURRENT_STATES in self.target.features and self.target.device.type != "cpu"
        copies = self.options.draft_from_text and proposer.shared_nodes is None and not costly
        count = text_nodes(bucket(rows), proposer.nodes, self.target.device.type, self._costs) if copies else 0
        key = id(proposer), count
        if count and key not in self._with_text:
            if isinstance(proposer, DraftModelProposer):
                # If copies were accepted, the last draft of the model may follow them, and was not read either.
                proposer = replace(proposer, reread=1 + count)
            self._with_text[key] = WithPromptLookup(proposer, count)
        return self._with_text[key] if count else proposer

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return the policy that chooses the drafts of steps of these batch sizes."""
        return DraftPolicy({size: self.proposer_for(size) for size in sizes})

    def times_by(self, costs: StepCosts) -> StepTimes:
        """Return the times of steps by these costs, with the corrections of earlier batches."""
        with self._lock:
            if self.step_times is None or self.step_times.assumed is not costs:
                clock = self.clock or time.perf_counter
                self.step_times = StepTimes(costs, self.undrafted, clock, corrected_every=self._corrected_every)
            return self.step_times

    @property
    def _corrected_every(self) -> int:
        """One in so many steps corrects the costs of steps by its time; 0 for none."""
        # With rejection sampling, other drafts draw other tokens, so no clock may choose them.
        if self.rejection_sampling or (self.target.device.type == "cpu" and self.clock is None):
            return 0
        return 1 if self.target.ranks.size == 1 else SHARED_EVERY

    @property
    def _costs(self) -> StepCosts:
        """Costs of steps, measured or assumed."""
        return self._measured or self._assumed

    @cached_property
    def _assumed(self) -> StepCosts:
        """Assumed costs of steps, used before any are measured."""
        # All ranks must agree, and their shards of the target may differ in size.
        alone, proposer = self.target.ranks.size == 1, self.proposer
        read = proposer.draft_bytes if alone and isinstance(proposer, SearchProposer) else 0
        if alone and proposer.model is not None:
            read = proposer.depth * forward_bytes(proposer.model.model)
        grouped = any(isinstance(layer, GroupedLinear) for layer in quantized_layers(self.model))
        device, itemsize = self.target.device.type, 1 if grouped else self.target.dtype.itemsize
        return StepCosts.assumed(
            device, draft=read, forward=forward_bytes(self.model), depth=max(proposer.depth, 1), itemsize=itemsize
        )

    def make_memory(self, rows: int = MOST_ROWS, max_rows: int | None = None, *, reuse: bool = True) -> PagedMemory:
        """Allocate a paged cache for at most `rows` rows of the longest sequence, and prepare the models' forwards.

        `max_rows` is the most rows at once; None for `rows`. Without `reuse`, no prefixes are stored.
        """
        return PagedMemory.on(
            self.target,
            None if self._unpaged_draft else self.draft_model,
            options=self.options,
            max_seq_len=self.options.max_seq_len,
            rows=rows,
            max_rows=rows if max_rows is None else max_rows,
            compile=self.options.compile,
            draft_pieces=None if self.draft_vocabulary is None else self.draft_vocabulary.max_pieces,
            reuse=reuse,
            search=self.proposer if isinstance(self.proposer, SearchProposer) else None,
        )

    @property
    def shared_memory(self) -> PagedMemory:
        """The paged memory of this engine, or of the one that lends it, which the first use allocates."""
        if self.lender is not None:
            return self.lender.shared_memory
        with self._lock:
            if self.memory is None:
                self.memory = self.make_memory(max_rows=self.options.max_batch_size)
            return self.memory

    @contextmanager
    def scheduler_for(
        self, request: CallRequest, speculate: bool = True, models: Models | None = None
    ) -> Iterator[Scheduler]:
        """Yield a scheduler without sequences for the rows of a request; `models` draft, or this engine for None.

        Its running batch is kept with its captured steps for later requests, unless an exception ends the context.
        """
        drafting: Models = self if models is None else models
        most = self.options.max_batch_size
        reason = self.target.varlen.reason or (self._unpaged_draft if speculate and drafting.draft_model else None)
        if reason and self.target.device.type == "cuda" and not self._warned:
            self._warned = True
            warn(f"{self.target.name} is decoded without CUDA graphs, slower: {reason}")
        memory = None if reason else self.shared_memory
        rows, params = min(len(request.rows), most), [row.params for row in request.rows]
        limits = Limits(
            rows,
            sys.maxsize,
            max_seq_len=self.options.max_seq_len,
            max_input_len=self.options.max_input_len,
            max_queue_size=0,
            guaranteed_no_evict=True,
            paced=False,
            admit_together=max(rows // 8, min(rows // 4, 2), 1),  # measured on a GPU: docs/benchmarks.md
            bulk=True,
        )
        with (self.lender or self).batches.lent(drafting, memory, params, most, speculate=speculate) as batch:
            scheduler = Scheduler(drafting, memory, limits, speculate=speculate, batch=batch)
            batch.reserve(max(len(row.prompt) + row.max_new_tokens for row in request.rows))
            yield scheduler

    @property
    def logits_reader(self) -> LogitsReader | None:
        """Return the reader that stores the logits of each step for later drafts; None where drafts read none."""
        return None if self.drafter is None else self.drafter.logits_reader

    @property
    def _unpaged_draft(self) -> str | None:
        """Reason why the draft model alone cannot run in captured steps; None if it can, or if the target cannot."""
        if self.draft_model is None or not self.target.varlen.ok:
            return None
        reason = self.draft_model.varlen.reason
        return reason and f"the draft model: {reason}"

    def drop_graphs(self) -> None:
        """Drop the captured steps and free their memory; the next batch captures again. No batch may be in use."""
        self.batches.drop()

    def forget_prefixes(self) -> None:
        """Drop stored prefixes and recycled tokens, so that later prompts are read in full. No batch may be in use."""
        if self.drafter is not None:
            self.drafter.forget_texts()
        if (memory := (self.lender or self).memory) is not None:
            memory.forget_prefixes()

    def lend_to(self, other: "Engine") -> None:
        """Let another engine on the same target use this one's GPU memory and captured steps in addition to its own."""
        assert other.target is self.target
        assert other.draft_model is None or other.draft_model is self.draft_model
        other.lender = None if other is self else self

    @property
    def samples_by_default(self) -> bool | None:
        """Return whether the checkpoint asks for sampling, by `do_sample` or its config; None if neither says."""
        return self.model.generation_config.do_sample if self.do_sample is None else self.do_sample

    @property
    def model(self) -> Any:
        """The target's Hugging Face model."""
        return self.target.model

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Streamer | None = None,
        seed: Seed = None,
        adapter: AdapterNames = None,
        speculate: bool = True,
        num_speculative_tokens: DraftLimits = None,
        progress: bool = False,
        return_dict_in_generate: bool | None = None,
        **generation_kwargs: object,
    ) -> Tensor | GenerateOutput:
        """Continue `input_ids` with exactly the tokens of undrafted decoding.

        Args:
            input_ids: Prompts, `[B, P]` integer, left-padded; `inputs` is an alias.
            attention_mask: 1 at tokens and 0 at padding, `[B, P]`; None where no row is padded.
            generation_config: As in transformers, after the arguments and before the model's own.
            streamer: A streamer of transformers, or a `StepStreamer`.
            seed: An int s gives s, s+1, ... to the output rows (after `num_return_sequences`), a list gives one to
                each. A row with its seed draws the same tokens alone, in any batch, and with `speculate=False`. None
                draws s from torch's CPU generator, which `torch.manual_seed` and `transformers.set_seed` seed.
            adapter: Name of a LoRA adapter that `load_adapter` has loaded, or a list of one or None per prompt; None
                for the model alone.
            speculate: False for undrafted decoding in the same engine.
            num_speculative_tokens: Most successive drafts that a step may accept, an int or one per output row, from 0
                for no drafts to the depth of the engine's drafts; None for that depth. It changes no token, unless
                sampled drafts are accepted by rejection sampling.
            progress: Whether to show a progress bar of finished sequences.
            return_dict_in_generate: Whether to return a `GenerateOutput`; None for the config's value.
            generation_kwargs: Hugging Face's names, with its meanings (`use_cache` has no effect: keys and values are
                always kept). Also, `temperature` may be a list with one value per output row; `frequency_penalty`,
                `presence_penalty` and `logit_bias` (a dict from ids) are OpenAI's; `grammar` is a `Grammar` that the
                output follows or an input of `Grammar`, with `tokenizer`, or a list of one or None per output row. A
                vision-language model takes the other outputs of its processor (`pixel_values`, ...).

        Returns:
            Ids `[B, P + new]`, laid out as by `model.generate`, or a `GenerateOutput` with `.stats`.

        Raises:
            ArgumentError: For arguments that are unknown, out of range or of the wrong shape.
            UnsupportedError: For modes that cannot be honoured (beam search, classifier-free guidance, ...).
        """
        own = OwnArguments(streamer, seed, adapter, speculate, num_speculative_tokens, progress)
        if return_dict_in_generate is not None:
            generation_kwargs["return_dict_in_generate"] = return_dict_in_generate
        return self._decode(self._prepare(own, input_ids, attention_mask, generation_config, **generation_kwargs))

    def _prepare(self, own: OwnArguments, /, *prompts: Any, **arguments: Any) -> PreparedCall:
        """Let transformers prepare a call; `prompts` and `arguments` are those of `generate` that it has too."""
        return prepare_call(self.target, self.do_sample, own, *prompts, **arguments)

    async def agenerate(self, *prompts: Any, **arguments: Any) -> Tensor | GenerateOutput:
        """Return what `generate` returns of the same arguments, without blocking the event loop.

        Calls that run at once share a batch on a paged cache, as a server's requests do. Cancelling the coroutine ends
        its sequences. A streamer, `max_time`, processors that no request of a server has, and tensor parallelism are
        refused by name.
        """
        return await self._async_calls.generate(prompts, arguments)

    def astream(self, *prompts: Any, **arguments: Any) -> AsyncIterator[int]:
        """Return an asynchronous iterator over the new tokens of one prompt, as steps write them.

        Arguments are those of `agenerate`. Closing the iterator, or cancelling what iterates, ends the sequence.
        """
        return self._async_calls.stream(prompts, arguments)

    @cached_property
    def _async_calls(self) -> AsyncCalls:
        self.target.features.check(ASYNC_CALLS)
        rows = min(Limits.max_batch_size, self.options.max_batch_size)
        # The memory of `generate` has room for both on a GPU.
        memory = self.shared_memory if self.target.device.type == "cuda" else self.make_memory(rows)
        limits = Limits(
            rows, max_seq_len=self.options.max_seq_len, max_input_len=self.options.max_input_len, max_queue_size=0
        )
        return AsyncCalls(Scheduler(self, memory, limits), self._prepare, self._reading)

    def custom_generate(
        self,
        *,
        streamer: Streamer | None = None,
        seed: Seed = None,
        adapter: AdapterNames = None,
        speculate: bool = True,
        num_speculative_tokens: DraftLimits = None,
        temperature: Sequence[float] | Tensor | None = None,
    ) -> Callable[..., Tensor | GenerateOutput]:
        """Return a function for `model.generate(..., custom_generate=engine.custom_generate())`.

        transformers passes neither its streamer nor its tokenizer to such a function: pass the streamer here, and stop
        strings as a `StopStringCriteria`. It does not pass `assistant_model` and `assistant_tokenizer` either, which
        `generate` refuses and which have no effect there.

        Args:
            streamer: As in `generate`.
            seed: As in `generate`.
            adapter: As in `generate`, but one per output row.
            speculate: As in `generate`.
            num_speculative_tokens: As in `generate`.
            temperature: One value per output row, in place of the config's; None for the config's.
        """
        own = OwnArguments(streamer, seed, adapter, speculate, num_speculative_tokens)

        def decode_for(model: PreTrainedModel, input_ids: Tensor, **inputs: object) -> Tensor | GenerateOutput:
            if model is not self.model:
                raise ArgumentError("this custom_generate belongs to another model; call generate on engine.model")
            check_shapes(input_ids, inputs.get("attention_mask"))
            return self._decode(PreparedCall(own, input_ids, inputs, temperature=temperature))

        return decode_for

    @torch.inference_mode()
    def _decode(self, call: PreparedCall) -> Tensor | GenerateOutput:
        """Decode a call that transformers has prepared."""
        own, stream = call.own, call.own.streamer
        with self._reading(call) as request, made_on_host():
            if takes_columns(stream):
                stream = ColumnStream(stream, len(call.input_ids), request.pad_token)
            with self.scheduler_for(request, own.speculate) as scheduler:
                return GenerateCall(request, stream).decode(scheduler, own.progress)

    @contextmanager
    def _reading(self, call: PreparedCall) -> Iterator[CallRequest]:
        """Yield the request of a call, and hold the models' current weights and the rows' adapters in the context."""
        rows = len(call.input_ids)
        names = row_adapters(call.own.adapter, call.prompts or rows, rows)
        check_autocast(self.target.device)
        with self.calling(speculate=call.own.speculate), self.target.adapters.holding(names) as held:
            with made_on_host():
                request = read_request(self.target, self.options, call, held, **call.inputs)
            yield request
