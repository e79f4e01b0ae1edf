"""The varlen forward: the tokens of all rows, of trees or of prompts, as one sequence, with attention of our own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.attention.prompt_attention import PROMPT_ATTENTION_NAME, Piece, PromptPlan
from redrafter.attention.tree_attention import (
    ATTENTION_NAME,
    register_attention,
    replacement_for,
    tree_attention_forward,
)
from redrafter.attention.tree_plan import RUNNING_PLAN, ChunkEnds, Plan
from redrafter.cache.dense import DenseCache
from redrafter.cache.paged import KVCache
from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE
from redrafter.model.batch_invariance import RowByRow
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.model.fused_linear import FusedLinears, linear_calls, same_inputs
from redrafter.model.positions import answer_by_position
from redrafter.model.recurrent_layers import PromptStates, replaced_mixers
from redrafter.model.tree_forward import ModelParts, TreeForward

COMPILE_OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 4,  # what every layer reads, sines and cosines, is computed once and not in each
    "combo_kernels": True,  # queries and keys are rotated in one launch
}

# Of a batch-invariant forward. What is measured on the device, or suits the first sizes that are seen, may be another
# order of sums for other sizes or in another process; one variant of each kernel, chosen without measuring, has one.
_FIXED_ORDER: dict[str, Any] = {
    "batch_invariant": True,  # from torch 2.13 on; it implies the next one
    "deterministic": True,
    "split_reductions": False,
    "dynamic_scale_rblock": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "combo_kernels": False,
    "coordinate_descent_tuning": False,
    "max_autotune": False,
    "triton.multi_kernel": 0,
    "triton.cooperative_reductions": False,
}

MAX_NODES_APART = 16  # of a chain whose nodes attend one by one, as those of a tree do, where sums have one order

register_attention(ATTENTION_NAME, tree_attention_forward)


class VarlenForward(TreeForward):
    """A causal LM's forward over the tokens of all rows as one sequence.

    Trees are verified on a paged cache; one compilation serves every batch and tree, since only the number of tokens
    varies and that is a dynamic dimension. Pieces of prompts are read on a CPU, on either kind of cache, uncompiled.

    Attributes:
        version: Number of times that the model's weights were replaced, or its code changed: a captured step knows
            those of its time.
        outdated: Whether linear layers were fused before that, and are not now.
    """

    def __init__(self, parts: ModelParts, config: Any):
        """Make the forward of a model.

        Args:
            parts: The model's parts.
            config: The config in which its decoder layers look up their attention function.
        """
        super().__init__(parts)
        self._config = config
        self._run: Any = self._plain
        self._prompt: Any = None  # `[T]` int64, only during a call
        self._positions: Any = None  # `[T]` int64, likewise
        self._fused: FusedLinears | None = None
        self.version, self.outdated = 0, False
        self._row_by_row: RowByRow | None = None

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, ChunkEnds | None]:
        """Run new nodes of trees, and then chunks of prompts, through the model; see `TreeForward`."""
        tree, chunks, count = batch.tree, batch.chunks, batch.tree.size
        index = torch.arange(count, device=batch.length.device)
        if batch.logits_index is not None:  # of a row without tokens in a ragged forward, any token will do
            index = (tree.row_starts()[:-1] + batch.logits_index).clamp(max=count - 1)
        of_nodes = len(index)
        if chunks is not None:
            index = torch.cat([index, count + chunks.last])
        with self._mixing(batch):
            logits, hidden = self._run_batch(batch, index)
        ends = None if chunks is None else ChunkEnds(logits[of_nodes:], hidden[index[of_nodes:]])
        if batch.logits_index is not None:
            return logits[:of_nodes, None], hidden[index[:of_nodes]][:, None], ends
        return tree.by_row(logits[:count]), tree.by_row(hidden[:count]), ends

    def _run_batch(self, batch: ForwardBatch, index: Tensor) -> tuple[Tensor, Tensor]:
        """Run the T tokens of a batch through the model, and the head at R of them, `index` `[R]` int64.

        Returns logits `[R, V]` and the hidden states of all tokens, `[T, F]`.
        """
        tree, length, cache, chunks, wanted = batch.tree, batch.length, batch.cache, batch.chunks, len(index)
        ids = batch.flat(tree.tokens[:, -tree.new :], None if chunks is None else chunks.tokens)
        in_chunks = None if chunks is None else chunks.positions()  # those of prompts are not shifted
        places = positions = batch.flat(batch.places, in_chunks)
        if batch.position_shift is not None:
            positions = batch.flat(batch.positions, in_chunks)
        if self._context is not None:
            # What is past the end is never kept.
            places, positions = places.clamp(max=self._context - 1), positions.clamp(max=self._context - 1)
        tokens = ids, places
        ids, positions, index = _aligned(ids), _aligned(positions), _aligned(index)
        invariant = self._row_by_row is not None
        if invariant and chunks is None and tree.is_chain and tree.new > MAX_NODES_APART:
            plan = cache.plan_chains(tree, length, self._kinds.windows, len(ids))
        else:
            plan = cache.plan(tree, length, self._kinds.windows, chunks, len(ids))
        plan = replace(plan, chunk_sizes=self._kinds.chunk_sizes, invariant=invariant)
        prompt = None if self._rope is None else _aligned(batch.token_rope_lengths)
        if prompt is not None:
            torch._dynamo.maybe_mark_dynamic(prompt, 0)
        for x in (ids, positions, index, *plan.tensors):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        keep = self._kept_columns(batch.token_adapters)
        if keep is not None:
            keep = pad(keep, (0, 0, 0, len(ids) - len(keep)))
            torch._dynamo.maybe_mark_dynamic(keep, 0)
        with self.lock, self._attending(ATTENTION_NAME, plan, keep, threads_apart=False):
            logits, hidden = self._run(ids, positions, index, plan, prompt, keep)
        hidden = hidden[: len(tokens[0])]
        if self._drafter_layer is not None:
            above = tree.tokens.shape[1] - tree.new
            offsets = length[:, None] + torch.arange(above, above + tree.new, device=length.device)  # [B, M]
            slots = cache.slots(offsets.clamp(max=cache.window - 1))  # past the end are nodes that a row has not
            slots = slots[batch.nodes] if chunks is None else torch.cat([slots[batch.nodes], chunks.slots()])
            self._drafter_layer.write(cache, slots, *tokens, hidden)
        return logits[:wanted], hidden

    def read_pieces(self, pieces: Sequence[Piece], read: Prompts, *, all_tokens: bool) -> tuple[Tensor, Tensor]:
        """Read pieces of prompts, T tokens together, in one forward on a CPU.

        Returns logits `[R, V]` and hidden states `[R, F]` of R tokens: one a piece, or all T with `all_tokens`.
        """
        prompts, cache = read.tokens, read.cache
        tokens = torch.cat([prompts[piece.row, piece.first : piece.end] for piece in pieces])  # [T]
        positions = torch.cat([torch.arange(piece.first, piece.end) for piece in pieces])
        if self._context is not None:
            positions = positions.clamp(max=self._context - 1)
        index = torch.arange(len(tokens))
        if not all_tokens:
            index = torch.tensor([piece.count for piece in pieces]).cumsum(0) - 1
        prompt = None
        if self._rope is not None:
            lengths = read.upto if read.rope_lengths is None else read.rope_lengths
            prompt = torch.cat([lengths[piece.row].expand(piece.count) for piece in pieces])
        adapters = read.adapters
        if adapters is not None:
            adapters = torch.cat([adapters[piece.row].expand(piece.count) for piece in pieces])
        keep = self._kept_columns(adapters)
        paged = cache.plan_prefill(pieces)
        plan = PromptPlan(pieces, self._kinds.by_layer or (), paged)
        with (
            self.lock,
            self._attending(PROMPT_ATTENTION_NAME, plan, keep, threads_apart=True),
            self._reading_states(pieces, cache),
        ):
            dense = cache if isinstance(cache, DenseCache) else None
            logits, hidden = self._plain(tokens, positions, index, plan, prompt, keep, dense)
        if self._drafter_layer is not None:
            if isinstance(cache, DenseCache):
                slots = cache.slots(tokens.device)
            else:
                assert paged is not None, "a paged cache says where its tokens are"
                slots = paged.new
            self._drafter_layer.write(cache, slots, tokens, positions, hidden)
        return logits, hidden[index]

    @property
    def linears_fused(self) -> bool:
        """Whether `fuse_linears` was called."""
        return self._fused is not None

    def fuse_linears(self, forward: Callable[[], object]) -> None:
        """Make one product of the linear layers that read the same tensor, in all later calls.

        Args:
            forward: Runs the model once, so that the calls of its layers can be watched.
        """
        with linear_calls(self._model) as calls:
            forward()
        # The head keeps its place, where the hook that records its input is.
        calls = [call for call in calls if self._model.get_submodule(call[0]) is not self._head]
        self._fused = FusedLinears(self._model, same_inputs(calls), thin=self._row_by_row is None)
        self.outdated = False

    def forget_fused(self) -> None:
        """Use the model's own layers, uncompiled, after its weights or code have changed."""
        self.version += 1
        self.outdated |= self.linears_fused
        self._fused = None
        self.compile(False)

    def compute_row_by_row(self, row_by_row: RowByRow | None) -> None:
        """Compute each token of later calls as it would be alone, bit for bit, or as fast as may be where this is None.

        Args:
            row_by_row: What makes the model compute so.
        """
        self._row_by_row = row_by_row

    def compile(self, compiled: bool = True) -> None:
        """Run later calls compiled by torch.compile, or as they are written."""
        options = COMPILE_OPTIONS if self._row_by_row is None else COMPILE_OPTIONS | _fixed_order()
        self._run = torch.compile(self._plain, fullgraph=True, options=options) if compiled else self._plain

    def _plain(
        self,
        ids: Tensor,
        positions: Tensor,
        index: Tensor,
        plan: Plan | PromptPlan,
        prompt: Tensor | None,
        keep: Tensor | None,
        cache: DenseCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run T tokens through the model, and the head at R of them.

        Args:
            ids: Tokens, `[T]` int64.
            positions: Their positions, `[T]` int64.
            index: The tokens at which to compute the head, `[R]` int64.
            plan: What attention must know of the forward.
            prompt: Length of text whose rope each token has at least, `[T]` int64; None where rope needs none.
            keep: Which columns of the adapters' stacks each token keeps, `[T, S * R]` bool; None for the model alone.
            cache: The model's own kind of cache, where the plan names no pages.

        Returns:
            Logits `[R, V]` and the hidden states of all tokens, `[T, F]`.
        """
        self._start_recording(index)
        self._prompt, self._positions = prompt, positions
        if keep is not None:  # set here, where a compiled forward sees that it is another tensor each time
            assert self._lora is not None
            self._lora.set_keep(keep)
        out = self._call_model(ids[None], positions[None], cache, plan=plan)
        self._prompt = self._positions = None
        return out.logits[0], self._recorded_hidden()[0]

    def _reading_states(self, pieces: Sequence[Piece], cache: KVCache) -> AbstractContextManager[None]:
        """Have the model's mixers read one piece behind the other, each from its row's state."""
        if cache.states is None:
            return nullcontext()
        starts = [0, *accumulate(piece.count for piece in pieces)][:-1]
        return replaced_mixers(self._mixers, PromptStates(pieces, starts, cache.states))

    def _select(self, hidden: Tensor) -> Tensor:
        return hidden[:, self._index]

    def _new_positions(self) -> Tensor:
        """Return the positions of the running forward's tokens, `[1, T]` int64."""
        return self._positions[None]

    def _running_prompt(self) -> Tensor:
        """Return the length of text whose rope each token of the running forward has at least, `[1, T]` int64."""
        return self._prompt[None]

    @contextmanager
    def _attending(
        self, attention: str, plan: Plan | PromptPlan, keep: Tensor | None, *, threads_apart: bool
    ) -> Iterator[None]:
        """Have the model attend by our function of that name, which `plan` tells of the forward.

        Args:
            attention: The name of the function.
            plan: What attention must know of the forward.
            keep: The columns of adapters that each token keeps, `[T, S * R]` bool; None for the model alone.
            threads_apart: Let the forwards of other threads pass what is set by.
        """
        running = RUNNING_PLAN.set(plan)
        try:
            with self._recording(threads_apart=threads_apart) as patch:
                loaded = self._config._attn_implementation
                patch.set(self._config, "_attn_implementation", replacement_for(loaded, attention))
                if self._rope is not None:
                    self._rope.apply(patch, self._running_prompt)
                if self._row_by_row is not None:
                    self._row_by_row.apply(patch)
                if self._fused is not None:
                    self._fused.apply(patch)
                self._adapt(patch, keep)  # its stand-ins are called before those for fused layers
                # After the fused layers, whose stand-ins have the hooks then.
                answer_by_position(patch, self._slot_readers, self._new_positions)
                yield
        finally:
            RUNNING_PLAN.reset(running)


def _aligned(x: Tensor) -> Tensor:
    """Return `[M]` padded with zeros to a multiple of `TOKEN_MULTIPLE`."""
    return pad(x, (0, -len(x) % TOKEN_MULTIPLE))


def _fixed_order() -> dict[str, Any]:
    """Return the options of `_FIXED_ORDER` that this version of torch has."""
    from torch._inductor import config  # takes seconds to import

    names = config.get_config_copy()
    return {name: value for name, value in _FIXED_ORDER.items() if name in names}
