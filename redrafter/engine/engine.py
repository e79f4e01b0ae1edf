"""The engine: `generate` as Hugging Face users know it, over a target and a proposer."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from redrafter.cache.block_manager import BlockManager
from redrafter.drafting.adaptive_length import AdaptiveDraftLength
from redrafter.drafting.proposer import PlainProposer, Proposer
from redrafter.engine.batch import Batch, DenseBatch, PagedBatch
from redrafter.engine.call_arguments import (
    NEUTRAL,
    prompt_of,
    with_row_temperatures,
    with_stop_strings,
    without_neutral,
)
from redrafter.engine.cuda_graphs import CUDAGraphRunner
from redrafter.engine.decoding import decode
from redrafter.engine.model_inputs import without_empty_inputs
from redrafter.engine.options import EngineOptions
from redrafter.engine.outputs import GenerateOutput
from redrafter.engine.request import (
    Request,
    Seed,
    check_arguments,
    check_shapes,
    known_arguments,
    read_request,
    with_grammar,
    with_openai_arguments,
)
from redrafter.engine.streaming import ColumnStream, StepStreamer
from redrafter.errors import ArgumentError
from redrafter.sampling.grammar_masks import check_grammars
from redrafter.target.mode_checks import check_autocast, check_eval
from redrafter.target.support import Support
from redrafter.target.target import Target

__all__ = ["Engine"]

Streamer = BaseStreamer | StepStreamer


class Engine:
    """A target and the proposer that drafts for it. Threads may share an engine.

    Between requests it keeps only what makes the next one faster: on a GPU the captured steps, and keys and values of
    texts that a prompt may begin with again.

    Args:
        target: The bound model whose text is wanted.
        proposer: What drafts for it.
        options: Limits of memory and lengths; None for the defaults.

    Attributes:
        target: The bound model whose text is wanted.
        proposer: What drafts for one row.
        options: Limits of memory and lengths.
        plain: The proposer that drafts nothing.
        draft_model: The model that drafts, or None.
        graphs: The captured steps and their memory, once a batch was opened on a GPU; None before.
        do_sample: Whether `generate` samples where neither a call nor a `generation_config` says; None for what the
            model's own says.
    """

    do_sample: bool | None = None

    def __init__(self, target: Target, proposer: Proposer, options: EngineOptions | None = None):
        self.target, self.proposer, self.options = target, proposer, options or EngineOptions()
        self.plain = PlainProposer()
        self.draft_model = proposer.model
        self.graphs: CUDAGraphRunner | None = None
        self.lender: Engine | None = None  # whose graphs are used, when not its own
        self._warned = False
        self._lock = threading.Lock()  # of two first requests at once, one makes the graphs of both

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows."""
        return self.proposer

    def open_batch(
        self, request: Request, proposer: Proposer, proposer_for: Callable[[int], Proposer] | None = None
    ) -> Batch:
        """Open a batch with the rows of a request; the caller closes it.

        Args:
            request: What is to be written.
            proposer: What drafts first.
            proposer_for: Gives what drafts once so few rows are left; None to keep the ended ones in the batch.
        """
        lengths = self.lengths_for(proposer, request)
        reason = self.target.varlen.reason or (proposer.model and self.draft_varlen.reason)
        if reason is None:
            graphs = (self.lender or self).open_graphs()
            # A captured step that belongs to one request alone is not worth capturing for every length.
            return PagedBatch(graphs, proposer, request, proposer_for, lengths if proposer_for else None)
        if self.target.device.type == "cuda" and not self._warned:
            self._warned = True
            warnings.warn(f"{self.target.name} is decoded without CUDA graphs, slower: {reason}", stacklevel=6)
        return DenseBatch(self.target, proposer, request, lengths)

    def open_graphs(self) -> CUDAGraphRunner:
        """Return `graphs`, made by the first call."""
        with self._lock:
            if self.graphs is None:
                draft_model = self.draft_model if self.draft_varlen.ok else None
                self.graphs = CUDAGraphRunner.on(self.target, self.options, draft_model)
            return self.graphs

    def lengths_for(self, proposer: Proposer, request: Request) -> AdaptiveDraftLength | None:
        """Return what sets the draft length of each step from the steps before it; None for one length throughout."""
        return None

    @property
    def draft_varlen(self) -> Support:
        """Whether steps with the draft model can be captured as far as that model decides; ok where there is none."""
        if self.draft_model is None or not self.target.varlen.ok:
            return Support()
        if self.draft_model.device != self.target.device:
            return Support(f"the draft model is on {self.draft_model.device} and the target on {self.target.device}")
        reason = self.draft_model.varlen.reason
        return Support(None if reason is None else f"the draft model: {reason}")

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the paged pools of keys and values; 0 before the first request and on the dense cache."""
        return 0 if self.graphs is None else sum(pool.nbytes for pool in self.graphs.store.pools)

    def drop_graphs(self) -> None:
        """Forget the captured steps and so free what they hold; the next batch captures again. No batch may be open."""
        if self.graphs is not None:
            self.graphs.drop_steps()

    def forget_prefixes(self) -> None:
        """Read the next prompts from the first token on, as if never seen. No batch may be open."""
        if (graphs := (self.lender or self).graphs) is not None:
            graphs.blocks = BlockManager(graphs.store.num_blocks)

    def lend_to(self, other: "Engine") -> None:
        """Let another engine on the same target use this one's GPU memory and captured steps beside its own."""
        assert other.target is self.target
        assert other.draft_model is None or other.draft_model is self.draft_model
        other.lender = None if other is self else self

    @property
    def rejection_sampling(self) -> bool:
        """Whether sampled drafts are kept by rejection sampling; sampled tokens are then not plain decoding's."""
        return False

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
        speculate: bool = True,
        return_dict_in_generate: bool | None = None,
        **generation_kwargs: Any,
    ) -> Tensor | GenerateOutput:
        """Continue `input_ids` with exactly the tokens that plain decoding would give.

        Args:
            input_ids: Prompts, `[B, P]` integer, left-padded; `inputs` is another name of them.
            attention_mask: 1 at tokens and 0 at padding, `[B, P]`; None where no row is padded.
            generation_config: As in transformers, after the arguments and before the model's own.
            streamer: A streamer of transformers, or a `StepStreamer`.
            seed: An int s gives s, s+1, ... to the output rows (after `num_return_sequences`), a list gives one to
                each. A row with its seed draws the same tokens alone, in any batch, and with `speculate=False`.
            speculate: False for plain decoding in the same engine.
            return_dict_in_generate: Whether to return a `GenerateOutput`; None for what the config says.
            generation_kwargs: Hugging Face's names, with its meanings (`use_cache` changes nothing: keys and values are
                always kept). Besides, `temperature` may be a list with one value per output row; `frequency_penalty`,
                `presence_penalty` and `logit_bias` (a dict from ids) are OpenAI's; `grammar` is a `Grammar` that the
                texts follow, or what `Grammar.of` reads, with `tokenizer`, or a list of one or None per output row.

        Returns:
            Ids `[B, P + new]`, laid out as `model.generate` lays them out, or a `GenerateOutput` with `.stats`.

        Raises:
            ArgumentError: For arguments that are unknown, out of range or of the wrong shape.
            UnsupportedError: For modes that cannot be honoured (beam search, classifier-free guidance, ...).
        """
        # 1. Read the arguments: drop those that ask for nothing, refuse those that cannot be honoured.
        kwargs = without_neutral(without_empty_inputs(generation_kwargs, self.model, known_arguments() | NEUTRAL))
        input_ids = prompt_of(input_ids, kwargs.pop("inputs", None))
        check_arguments(kwargs)
        if not isinstance(generation_config, GenerationConfig | None):
            raise ArgumentError(f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}")

        # 2. Check the shapes that transformers counts on. Ids and mask are checked as it prepares them, in phase 4.
        check_shapes(input_ids, attention_mask)

        # 3. Say in transformers' terms what it has no names for, or would not hand on.
        kwargs = with_grammar(with_openai_arguments(kwargs, input_ids.shape[1]), input_ids.shape[1])
        kwargs = with_row_temperatures(kwargs)
        if return_dict_in_generate is not None:
            kwargs["return_dict_in_generate"] = return_dict_in_generate
        kwargs, generation_config = with_stop_strings(kwargs, generation_config, self.model.generation_config)
        if self.do_sample is not None and generation_config is None:
            kwargs.setdefault("do_sample", self.do_sample)

        # 4. Let transformers prepare the call (configs, processors, criteria, rows), and decode what it prepared.
        prepared = False

        def decode_prepared(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor | GenerateOutput:
            nonlocal prepared
            prepared = True
            return self._decode(input_ids, **inputs, streamer=streamer, seed=seed, speculate=speculate)

        try:
            return self.model.generate(
                input_ids.to(self.target.device),
                attention_mask=None if attention_mask is None else attention_mask.to(self.target.device),
                generation_config=generation_config,
                streamer=streamer if isinstance(streamer, BaseStreamer) else None,
                custom_generate=decode_prepared,
                **kwargs,
            )
        except (ValueError, TypeError, ImportError) as error:
            if prepared:
                raise
            raise ArgumentError(str(error)) from error

    def custom_generate(
        self,
        *,
        streamer: Streamer | None = None,
        seed: Seed = None,
        speculate: bool = True,
        temperature: Any = None,
    ) -> Callable[..., Tensor | GenerateOutput]:
        """Return a function for `model.generate(..., custom_generate=engine.custom_generate())`.

        transformers hands neither its streamer nor its tokenizer to such a function: give the streamer here, and stop
        strings as a `StopStringCriteria`.

        Args:
            streamer: As in `generate`.
            seed: As in `generate`.
            speculate: As in `generate`.
            temperature: One value per output row, in place of the config's; None for the config's.
        """

        def decode_for(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor | GenerateOutput:
            if model is not self.model:
                raise ArgumentError("this custom_generate belongs to another model; call generate on engine.model")
            check_shapes(input_ids, inputs.get("attention_mask"))
            settings: dict[str, Any] = {"streamer": streamer, "seed": seed, "speculate": speculate}
            return self._decode(input_ids, **inputs, **settings, temperature=temperature)

        return decode_for

    @torch.inference_mode()
    def _decode(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: Streamer | None,
        seed: Seed,
        speculate: bool,
        temperature: Any = None,
        **inputs: Any,
    ) -> Tensor | GenerateOutput:
        """Decode a call that transformers has prepared; `inputs` is what it would give to the model beside the ids."""
        # 1. Check the model, which its owner may have changed since.
        check_autocast(self.target.device)
        check_eval(self.model, *([self.draft_model.model] if speculate and self.draft_model else []))

        # 2. Check the ids, and turn the call into tensors.
        request = read_request(
            self.target,
            input_ids,
            inputs.pop("attention_mask", None),
            generation_config,
            logits_processor,
            stopping_criteria,
            inputs,
            options=self.options,
            seed=seed,
            temperature=temperature,
        )
        stream: Any = streamer
        if isinstance(streamer, BaseStreamer):
            stream = ColumnStream(streamer, len(input_ids), request.pad_token)

        # 3. Decode. Rows that others leave go on in a smaller batch, unless something of theirs cannot be told apart:
        # constants of the request, or scores that are recorded.
        proposer_for = self.proposer_for if speculate else lambda rows: self.plain
        divisible = request.sampler.by_row and not request.want_scores and not request.want_logits
        proposer = proposer_for(len(request.lengths))
        batch = self.open_batch(request, proposer, proposer_for if divisible else None)
        output = decode(batch, request, input_ids, stream)

        # 4. Refuse texts that their grammars could not follow to the end.
        check_grammars(request.sampler.processors)
        return output
