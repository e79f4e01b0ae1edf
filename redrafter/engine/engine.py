"""`generate`, as Hugging Face users know it."""

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
from redrafter.engine.call_arguments import NEUTRAL, prompt_of, with_stop_strings, without_neutral
from redrafter.engine.cuda_graphs import CUDAGraphRunner
from redrafter.engine.decoding import decode
from redrafter.engine.model_inputs import without_empty_inputs
from redrafter.engine.options import EngineOptions
from redrafter.engine.outputs import GenerateOutput
from redrafter.engine.request import (
    Request,
    Seed,
    check_arguments,
    check_inputs,
    known_arguments,
    read_request,
    with_grammar,
    with_openai_arguments,
)
from redrafter.engine.streaming import ColumnStream, StepStreamer
from redrafter.errors import ArgumentError
from redrafter.sampling.grammar_masks import check_grammars
from redrafter.target.mode_checks import check_autocast, check_eval
from redrafter.target.target import Target

__all__ = ["Engine"]

Streamer = BaseStreamer | StepStreamer


class Engine:
    """A target and what proposes for it. Of requests it keeps nothing but what makes the next one faster: on a GPU the
    captured steps, and keys and values of texts that a prompt may begin with again. Threads may share an engine.

    do_sample: what `generate` does where neither a call nor a `generation_config` says; None: as the model's own."""

    do_sample: bool | None = None

    def __init__(self, target: Target, proposer: Proposer, options: EngineOptions | None = None):
        self.target, self.proposer, self.options = target, proposer, options or EngineOptions()
        self.plain = PlainProposer()
        self.draft_model = proposer.model
        self._graphs: CUDAGraphRunner | None = None
        self._lender: Engine | None = None  # whose graphs are used, when not its own
        self._warned = False
        self._lock = threading.Lock()  # of two first requests at once, one makes the graphs of both

    def proposer_for(self, rows: int) -> Proposer:
        """What proposes for a batch of so many rows."""
        return self.proposer

    def open_batch(
        self, request: Request, proposer: Proposer, proposer_for: Callable[[int], Proposer] | None = None
    ) -> Batch:
        """The rows of a request, to be decoded with a proposer; to be closed. proposer_for: what proposes when so few
        are left; None to keep the ended ones in the batch."""
        lengths = self.lengths_for(proposer, request)
        reason = self.target.varlen.reason or (proposer.model and self.draft_unpacked)
        if reason is None:
            # A captured step that belongs to one request alone is not worth capturing for every length.
            return PagedBatch(
                (self._lender or self)._open_graphs(),
                proposer,
                request,
                proposer_for,
                lengths if proposer_for else None,
            )
        if self.target.device.type == "cuda" and not self._warned:
            self._warned = True
            warnings.warn(f"{self.target.name} is decoded without CUDA graphs, slower: {reason}", stacklevel=6)
        return DenseBatch(self.target, proposer, request, lengths)

    def _open_graphs(self) -> CUDAGraphRunner:
        with self._lock:
            if self._graphs is None:
                draft_model = None if self.draft_unpacked else self.draft_model
                self._graphs = CUDAGraphRunner.on(self.target, self.options, draft_model)
            return self._graphs

    def lengths_for(self, proposer: Proposer, request: Request) -> AdaptiveDraftLength | None:
        """What says after each step how far to draft in the next; None: as far as ever."""
        return None

    @property
    def draft_unpacked(self) -> str | None:
        """Why steps with the draft model cannot be captured; None when they can, or when there is none."""
        if self.draft_model is None or not self.target.varlen.ok:
            return None
        if self.draft_model.device != self.target.device:
            return f"the draft model is on {self.draft_model.device} and the target on {self.target.device}"
        return self.draft_model.varlen.reason and f"the draft model: {self.draft_model.varlen.reason}"

    def drop_graphs(self) -> None:
        """Forget captured steps, and so free what they hold; the next batch captures again. For when no batch is
        open."""
        if self._graphs is not None:
            self._graphs._kept.clear()
            self._graphs._pool = None  # a pool ends with the last graph in it

    def forget_prefixes(self) -> None:
        """Read the next prompts from the first token on, as if never seen. For when no batch is open."""
        if (graphs := (self._lender or self)._graphs) is not None:
            graphs.blocks = BlockManager(graphs.store.num_blocks)

    def lend_to(self, other: "Engine") -> None:
        """Let another engine on the same target use this one's GPU memory and captured steps beside its own."""
        assert other.target is self.target and (other.draft_model is None or other.draft_model is self.draft_model)
        other._lender = None if other is self else self

    @property
    def rejection_sampling(self) -> bool:
        """Tell whether sampled drafts are kept by rejection sampling; sampled tokens are then not plain decoding's."""
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
        """Write on from `input_ids`, with exactly the tokens that plain decoding would give.

        input_ids, attention_mask: `[B, P]`, left-padded; `inputs` is another name of the ids. generation_config: as in
        transformers, after the arguments and before the model's own. generation_kwargs: Hugging Face's names, with its
        meanings (`use_cache` changes nothing: keys and values are always kept); besides, `temperature` may be a list
        with one value per output row, and `frequency_penalty`, `presence_penalty` and `logit_bias` (a dict from ids)
        are OpenAI's; `grammar` is a `Grammar` that the texts follow, or what `Grammar.of` reads, with `tokenizer`, or a
        list of one or None per output row. seed: an int s gives s, s+1, ... to the output rows (after
        `num_return_sequences`), a list gives one to each; a row with its seed draws the same tokens alone, in any
        batch, and with `speculate=False`, which is plain decoding in the same engine.

        Returns ids `[B, P + new]` laid out as `model.generate` lays them out, or a `GenerateOutput` with `.stats`.
        Raises `ArgumentError` for arguments that are unknown, out of range or of the wrong shape, and
        `UnsupportedError` for modes that cannot be honoured (beam search, classifier-free guidance, ...).
        """
        kwargs = without_neutral(without_empty_inputs(generation_kwargs, self.model, known_arguments() | NEUTRAL))
        input_ids = prompt_of(input_ids, kwargs.pop("inputs", None))
        check_arguments(kwargs)
        check_inputs(input_ids, attention_mask, self.target)
        if not isinstance(generation_config, GenerationConfig | None):
            raise ArgumentError(f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}")
        kwargs = with_grammar(with_openai_arguments(kwargs, input_ids.shape[1]), input_ids.shape[1])
        if return_dict_in_generate is not None:
            kwargs["return_dict_in_generate"] = return_dict_in_generate
        kwargs, generation_config = with_stop_strings(kwargs, generation_config, self.model.generation_config)
        if self.do_sample is not None and generation_config is None:
            kwargs.setdefault("do_sample", self.do_sample)
        temperature = kwargs.get("temperature")
        if isinstance(temperature, list | tuple | Tensor):
            kwargs["temperature"] = 2.0  # makes transformers put a temperature where the rows' own will stand
        else:
            temperature = None
        run = self.custom_generate(streamer=streamer, seed=seed, speculate=speculate, temperature=temperature)
        entered = False

        def custom_generate(*args: Any, **prepared: Any) -> Tensor | GenerateOutput:
            nonlocal entered
            entered = True
            return run(*args, **prepared)

        try:
            return self.model.generate(
                input_ids.to(self.target.device),
                attention_mask=None if attention_mask is None else attention_mask.to(self.target.device),
                generation_config=generation_config,
                streamer=streamer if isinstance(streamer, BaseStreamer) else None,
                custom_generate=custom_generate,
                **kwargs,
            )
        except (ValueError, TypeError, ImportError) as error:
            if entered:
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
        """For `model.generate(..., custom_generate=engine.custom_generate())`.

        transformers hands neither its streamer nor its tokenizer to such a function: give the streamer here, and stop
        strings as a `StopStringCriteria`. temperature: one value per output row, in place of the config's.
        """

        @torch.inference_mode()
        def custom_generate(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **prepared: Any,  # no parameter of its own for the mask: transformers would pass it twice
        ) -> Tensor | GenerateOutput:
            if model is not self.model:
                raise ArgumentError("this custom_generate belongs to another model; call generate on engine.model")
            check_autocast(self.target.device)
            check_eval(self.model, *([self.draft_model.model] if speculate and self.draft_model else []))
            request = read_request(
                self.target,
                input_ids,
                prepared.pop("attention_mask", None),
                generation_config,
                logits_processor,
                stopping_criteria,
                prepared,
                options=self.options,
                seed=seed,
                temperature=temperature,
            )
            stream: Any = streamer
            if isinstance(streamer, BaseStreamer):
                stream = ColumnStream(streamer, len(input_ids), request.pad_token)
            proposer_for = self.proposer_for if speculate else lambda rows: self.plain
            # What belongs to a row must be found again: with constants of its own, or its scores, a batch stays whole.
            whole = request.want_scores or request.want_logits or not request.sampler.by_row
            proposer = proposer_for(len(request.lengths))
            batch = self.open_batch(request, proposer, None if whole else proposer_for)
            output = decode(batch, request, input_ids, stream)
            check_grammars(request.sampler.processors)
            return output

        return custom_generate
