"""The varlen forward: the tokens of all rows, of trees or of prompts, as one sequence, with attention of our own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from redrafter.attention import tree_attention
from redrafter.attention.prompt_attention import PROMPT_ATTENTION_NAME, Piece, PromptPlan
from redrafter.attention.tree_plan import RUNNING_PLAN, ChunkEnds, Plan
from redrafter.cache.paged import PagedCache
from redrafter.features import ADAPTERS, IMAGES, ROPE_BY_LENGTH
from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.model.layer_compiler import LayerCompiler
from redrafter.model.linear_layers import FusedLinears, linear_calls, same_inputs
from redrafter.model.mixer_operator import MixerOperators
from redrafter.model.patch import MODEL_ERRORS, ModelPatch
from redrafter.model.positions import answer_by_position
from redrafter.model.recurrent_layers import PromptStates, TreeStates, mixer_plan, replace_mixers
from redrafter.model.repeated_layers import RepeatedLayers
from redrafter.model.tree_forward import BoundModel, TreeForward

COMPILE_OPTIONS: dict[str, object] = {
    "realize_opcount_threshold": 4,  # what every layer reads, sines and cosines, is computed once and not in each
    "combo_kernels": True,  # queries and keys are rotated in one launch
}

ATTENTION_OPERATORS = ("redrafter::tree_attention", "redrafter::invariant_attention")
# Operators that a compiler does not look into, one or more in each layer.
CUTS = (*ATTENTION_OPERATORS, "redrafter::mix")

# Of a batch-invariant forward. Settings measured on the device, or chosen for the first sizes seen, may be another
# order of sums for other sizes or in another process; one variant of each kernel, chosen without measuring, has one.
_FIXED_ORDER: dict[str, object] = {
    "batch_invariant": True,  # from torch 2.13 on; it implies the next one
    "deterministic": True,
    **dict.fromkeys(("split_reductions", "dynamic_scale_rblock", "benchmark_fusion", "benchmark_combo_kernel"), False),
    **dict.fromkeys(("combo_kernels", "coordinate_descent_tuning", "max_autotune"), False),
    "triton.multi_kernel": 0,
    "triton.cooperative_reductions": False,
}

MAX_NODES_APART = 16  # of a chain whose nodes attend one by one, as those of a tree do, where sums have one order

tree_attention.register_attention(tree_attention.ATTENTION_NAME, tree_attention.tree_attention_forward)
tree_attention.register_attention(
    tree_attention.HOST_ATTENTION_NAME, tree_attention.tree_attention_forward, masks_for_others=True
)


class VarlenForward(TreeForward):
    """A causal LM's forward over the tokens of all rows as one sequence.

    Trees are verified on a paged cache; one compilation serves every batch and tree, since only the number of tokens
    varies and that is a dynamic dimension. Pieces of prompts are read on a CPU, on either kind of cache, uncompiled.

    Attributes:
        outdated: Whether linear layers were fused before the model's weights were replaced or its code was changed, and
            are not now.
        row_by_row: Patches a forward so that each token is computed as it would be alone, bit for bit; None for
            forwards as fast as may be.
    """

    def __init__(self, bound: BoundModel):
        """Make the forward of a model whose traits are known."""
        super().__init__(bound)
        self._run: Any = self._eager
        self._compiled = False
        self._prompt: Any = None  # `[T]` int64, only during a call
        self._positions: Any = None  # `[T]` int64, likewise
        self._fused: FusedLinears | None = None
        self._operators: MixerOperators | None = None  # of a compiled forward with mixers
        self._repeated: RepeatedLayers | None = None  # of a compiled forward; None where all layers are traced
        self.outdated = False
        self.row_by_row: Callable[[ModelPatch], None] | None = None

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, ChunkEnds | None]:
        """Run new nodes of trees, and then chunks of prompts, through the model; see `TreeForward`."""
        bound = self.bound
        tree = batch.tree
        length = batch.length
        cache = batch.cache
        chunks = batch.chunks
        assert isinstance(cache, PagedCache), "trees are verified on a paged cache"
        # 1. Which tokens there are, where they are, and at which of them the head is computed.
        new, count = tree.new, tree.size
        index = torch.arange(count, device=length.device)
        if batch.logits_index is not None:  # of a row without tokens in a ragged forward, any token will do
            index = (tree.row_starts[:-1] + batch.logits_index).clamp(max=count - 1)
        of_nodes = len(index)
        if chunks is not None:
            index = torch.cat([index, count + chunks.last])
        ids = batch.flat(tree.tokens[:, -new:], None if chunks is None else chunks.tokens)
        in_chunks = None if chunks is None else chunks.positions()  # those of prompts are not shifted
        in_rows = batch.places

        def flat_positions(of_rows: Tensor) -> Tensor:
            flat = batch.flat(of_rows, in_chunks)
            return flat if bound.context is None else flat.clamp(max=bound.context - 1)  # later entries are never kept

        places = positions = flat_positions(in_rows)
        if (shift := batch.inputs.get(IMAGES)) is not None:
            positions = flat_positions(in_rows + shift[:, None])
        new_ids = ids  # before padding

        # 2. What attention and adapters must know. Numbers of tokens vary from call to call of a compiled forward.
        ids = _aligned(ids)
        positions = _aligned(positions)
        head_index = _aligned(index)
        if self.row_by_row is not None and chunks is None and tree.is_chain and new > MAX_NODES_APART:
            plan = cache.plan_chains(tree, length, self._kinds.windows, len(ids))
        else:
            plan = cache.plan(tree, length, windows=self._kinds.windows, chunks=chunks, tokens=len(ids))
        plan = replace(plan, chunk_sizes=self._kinds.chunk_sizes, invariant=self.row_by_row is not None)
        prompt = None
        if bound.rope is not None:
            prompt = _aligned(batch.token_inputs(ROPE_BY_LENGTH))
        keep = None
        if ADAPTERS in batch.inputs:
            keep = self._kept_columns(batch.token_inputs(ADAPTERS), len(ids))
        # One compilation must serve any number of tokens.
        for x in (ids, positions, head_index, *plan.tensors, prompt, keep):
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 0)

        # 3. Run the model. A drafter's keys and values of the tokens are stored with the model's.
        mixing = mixer_plan(batch, padded=False) if self._mixers else None
        on_host = bound.device.type == "cpu" and not self._compiled
        attention = tree_attention.HOST_ATTENTION_NAME if on_host else tree_attention.ATTENTION_NAME
        attending = partial(self._attending, attention, plan, mixing, keep, self._operators)
        repeated = self._repeated if keep is None and not bound.aux_modules else None
        with bound.lock:
            logits, hidden = self._run_in(attending, (ids, positions, head_index, plan, prompt, keep), repeated)
        hidden = hidden[: len(new_ids)]
        if bound.drafter_layer is not None:
            slots = batch.slots()[:, tree.verified_nodes]
            if chunks is not None:
                slots = torch.cat([slots, torch.stack([chunks.slots(), chunks.slots(back=1)])], dim=1)
            own, before = slots
            bound.drafter_layer.write(cache, own, lambda: before, new_ids, places, hidden)

        # 4. Split the head's output between rows and chunks.
        logits = logits[: len(index)]
        ends = None if chunks is None else ChunkEnds(logits[of_nodes:], hidden[index[of_nodes:]])
        if batch.logits_index is not None:
            return logits[:of_nodes, None], hidden[index[:of_nodes]][:, None], ends
        logits, hidden = (x[None] if batch.flat_outputs else tree.by_row(x) for x in (logits[:count], hidden[:count]))
        return logits, hidden, ends

    def _run_in(
        self, attending: Callable[..., Any], inputs: tuple[Any, ...], repeated: RepeatedLayers | None
    ) -> tuple[Tensor, Tensor]:
        """Run the model in a context; with `repeated` layers, check the result of a run that has compiled them."""
        if repeated is not None:
            try:
                with attending(repeated=repeated):
                    logits, hidden = self._run(*inputs)
                if repeated.checked:
                    return logits, hidden
                with attending():
                    _, expected = self._eager(*inputs)
                if repeated.agrees(hidden, expected):
                    return logits, hidden
            except MODEL_ERRORS:
                if repeated.checked:
                    raise
            self._repeated = None  # from now on, all layers are traced
        with attending():
            logits, hidden = self._run(*inputs)
        return logits, hidden

    def read_pieces(self, pieces: Sequence[Piece], read: Prompts, *, all_tokens: bool) -> tuple[Tensor, Tensor]:
        """Read pieces of prompts, T tokens together, in one forward on a CPU.

        Returns logits `[R, V]` and hidden states `[R, F]` of R tokens: one a piece, or all T with `all_tokens`.
        """
        bound = self.bound
        cache = read.cache
        counts = torch.tensor([piece.count for piece in pieces])
        rows = torch.tensor([piece.row for piece in pieces]).repeat_interleave(counts)  # [T]
        positions = torch.cat([torch.arange(piece.first, piece.end) for piece in pieces])
        tokens = read.tokens[rows, positions]
        if bound.context is not None:
            positions = positions.clamp(max=bound.context - 1)
        index = torch.arange(len(tokens)) if all_tokens else counts.cumsum(0) - 1
        prompt = None
        if bound.rope is not None:
            prompt = read.inputs.get(ROPE_BY_LENGTH, read.upto)[rows]
        keep = None
        if (slots := read.inputs.get(ADAPTERS)) is not None:
            keep = self._kept_columns(slots[rows], len(tokens))
        plan = cache.plan_prefill(pieces, self._kinds.by_layer or ())
        states = None if cache.states is None else PromptStates(pieces, cache.states)
        with bound.lock, self._attending(PROMPT_ATTENTION_NAME, plan, states, keep):
            logits, hidden = self._eager(tokens, positions, index, plan, prompt, keep, cache.for_model)
        if bound.drafter_layer is not None:

            def before() -> Tensor:
                # Of a piece's first token, the last one of an earlier piece. A row has one piece at most.
                ends = torch.zeros_like(read.upto)
                for piece in pieces:
                    ends[piece.row] = max(piece.first - 1, 0)
                earlier = cache.slots(ends[:, None])[rows[counts.cumsum(0) - counts]]
                return plan.new.roll(1).index_copy(0, counts.cumsum(0) - counts, earlier)

            bound.drafter_layer.write(cache, plan.new, before, tokens, positions, hidden)
        return logits, hidden[index]

    @property
    def linears_fused(self) -> bool:
        """Return whether `fuse_linears` was called."""
        return self._fused is not None

    def fuse_linears(self, forward: Callable[[], object]) -> None:
        """Make one product of the linear layers that read the same tensor, in all later calls.

        Args:
            forward: Runs the model once, so that the calls of its layers can be watched.
        """
        model = self.bound.model
        with linear_calls(model) as calls:
            forward()
        # The head keeps its place, where the hook that records its input is.
        calls = [call for call in calls if model.get_submodule(call[0]) is not self.bound.head]
        self._fused = FusedLinears(model, same_inputs(calls), thin=self.row_by_row is None)
        self.outdated = False

    def forget_fused(self) -> None:
        """Use the model's own layers, uncompiled, after its weights or code have changed."""
        self.outdated |= self.linears_fused
        self._fused = None
        self.compile(False)

    def compile(self, compiled: bool = True) -> None:
        """Enable or disable torch.compile for later calls."""
        self._run, self._operators, self._compiled, self._repeated = self._eager, None, compiled, None
        if not compiled:
            return
        from torch._inductor import config  # these take seconds to import
        from torch._inductor.compile_fx import compile_fx

        options = COMPILE_OPTIONS
        if self.row_by_row is not None:
            names = config.get_config_copy()  # of the options that this version of torch has
            options = options | {name: value for name, value in _FIXED_ORDER.items() if name in names}
        if self._mixers:
            self._operators = MixerOperators(self.bound.model, self._mixers)
        inductor: Any = partial(compile_fx, config_patches=options)
        bound, extend = self.bound, None
        if not (self._mixers or self._slot_readers or bound.rope or self.row_by_row):
            self._repeated = RepeatedLayers.find(bound.model, bound.config)
        if self._repeated is not None:
            extend = self._repeated.extend
        backend = LayerCompiler(CUTS, inductor, extend)
        self._run = torch.compile(self._eager, fullgraph=True, backend=backend)

    def _eager(
        self,
        ids: Tensor,
        positions: Tensor,
        index: Tensor,
        plan: Plan | PromptPlan,
        prompt: Tensor | None,
        keep: Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run T tokens `ids` at `positions` `[T]` through the model, and the head at R of them, `index` `[R]` int64.

        `plan` is what attention must know of the forward, `prompt` the length of text whose rope each token has at
        least, `[T]` int64, `keep` the columns of adapters that it keeps, `[T, S * R]` bool, and `cache` the model's own
        kind of cache, where the plan names no pages. Returns logits `[R, V]` and the hidden states of all tokens.
        """
        self._index = index[None]
        self._prompt = prompt
        self._positions = positions
        if keep is not None:  # set here, where a compiled forward sees that it is another tensor each time
            self.bound.adapters.stacks.set_keep(keep)
        out = self._call_model(ids[None], positions[None], cache, plan=plan)
        self._prompt = self._positions = None
        return out.logits[0], self._recorded_hidden()[0]

    def _kept_columns(self, adapters: Tensor, count: int) -> Tensor:
        """Return which columns of the adapters' stacks each of `count` tokens keeps; the last ones may be padding."""
        return pad(self.bound.adapters.stacks.keep(adapters), (0, 0, 0, count - len(adapters)))

    def _new_positions(self) -> Tensor:
        return self._positions[None]

    def _running_prompt(self) -> Tensor:
        return self._prompt[None]

    @contextmanager
    def _attending(
        self,
        attention: str,
        plan: Plan | PromptPlan,
        mixing: TreeStates | PromptStates | None,
        keep: Tensor | None,
        operators: MixerOperators | None = None,
        repeated: RepeatedLayers | None = None,
    ) -> Iterator[None]:
        """Have the model attend by this library's function of that name, which `plan` describes the forward to.

        `mixing` is what mixers must know of it, and `keep` the columns of adapters that each token keeps.
        `operators` call the mixers in a compiled forward, of which the first of the `repeated` layers are traced.
        """
        bound, running = self.bound, RUNNING_PLAN.set(plan)
        try:
            with self._recording() as patch:
                loaded = bound.config._attn_implementation
                patch.set(bound.config, "_attn_implementation", tree_attention.replacement_for(loaded, attention))
                if mixing is not None and operators is not None:
                    operators.add_to(patch, mixing)
                elif mixing is not None:
                    replace_mixers(patch, self._mixers, mixing)
                if bound.rope is not None:
                    bound.rope.add_to(patch, self._running_prompt)
                if self.row_by_row is not None:
                    self.row_by_row(patch)
                if self._fused is not None:
                    self._fused.add_to(patch)
                if keep is not None:  # its stand-ins are called before those for fused layers
                    bound.adapters.stacks.add_to(patch, keep)
                if repeated is not None:
                    repeated.add_to(patch)
                if self._slot_readers:  # after the fused layers, whose stand-ins have the hooks then
                    answer_by_position(patch, self._slot_readers, self._new_positions)
                yield
            if mixing is not None:
                mixing.finish()
        finally:
            RUNNING_PLAN.reset(running)


def _aligned(x: Tensor) -> Tensor:
    """Return `[M]` padded with zeros to a multiple of `TOKEN_MULTIPLE`, without a copy if it is one."""
    return pad(x, (0, -len(x) % TOKEN_MULTIPLE)) if len(x) % TOKEN_MULTIPLE else x
