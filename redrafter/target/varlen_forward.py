"""The forward of a packed batch: all rows of a tree, or of prompts, as one sequence, with attention of our own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from redrafter.attention.mask import AttentionKind
from redrafter.attention.positions import by_position
from redrafter.attention.prompt_attention import PROMPT_ATTENTION_NAME, PromptPlan, pieces
from redrafter.attention.tree_attention import ATTENTION_NAME, RUNNING_PLAN, Plan, tree_attention_forward
from redrafter.cache.dense import DenseCache
from redrafter.cache.paged import PagedCache
from redrafter.target.aux_hidden import in_this_thread, join, tapped
from redrafter.target.fused_linear import FusedLinears, linear_calls, same_inputs
from redrafter.target.rope import SwitchingRope
from redrafter.tree.token_tree import Tree

__all__ = ["VarlenForward"]

ALIGN = 8  # tokens; a forward is padded to a multiple, which matrix products like, and which makes it never one token

OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 4,  # what every layer reads, sines and cosines, is computed once and not in each
    "combo_kernels": True,  # queries and keys are rotated in one launch
}

AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)

# What stands on a model during a call must not be taken down by the end of another's, of whichever engine.
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


class VarlenForward:
    """A causal LM's forward over packed trees. Nothing of it stays on the model between calls.

    windows: positions that each layer looks back, 0 for all; see `attention_probe`. slot_readers: see `by_position`.

    One compilation serves every batch and tree: only the number of tokens varies, and that is a dynamic dimension.
    """

    def __init__(
        self,
        model: Any,
        head: nn.Module,
        config: Any,
        context: int | None,
        windows: tuple[int, ...] = (),
        slot_readers: Sequence[nn.Module] = (),
    ):
        self._model, self._head, self._config, self._context = model, head, config, context
        self._windows, self._slot_readers = windows, slot_readers
        self._wanted: Any = None  # this, the next two and `_long` hold something during a call alone
        self._hidden: Any = None
        self._outputs: tuple[Tensor, ...] = ()
        self._layers: Sequence[nn.Module] = ()
        self._numbers: tuple[int, ...] = ()
        self._run: Any = self._plain
        self.rope: SwitchingRope | None = None
        self._long: Any = None
        self._merged: FusedLinears | None = None
        self.lock: Any = _LOCKS.setdefault(model, threading.RLock())

    def __call__(
        self,
        tree: Tree,
        length: Tensor,
        cache: PagedCache,
        only: Tensor | None = None,
        long: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, M, V]` and hidden `[B, M, F]`; with `only` `[B]`, at that one of the M, `[B, 1, ...]`.

        long: `[B]` bool, whose rope is that of long texts, where a model's rope switches.
        """
        rows, nodes = len(length), tree.new
        positions = length[:, None] + tree.depth[:, -nodes:]
        if self._context is not None:
            positions = positions.clamp(max=self._context - 1)  # what is past the end is never kept
        wanted = torch.arange(rows * nodes, device=length.device)
        if only is not None:
            wanted = wanted.view(rows, nodes).gather(1, only[:, None]).flatten()
        ids, positions, wanted = (
            _aligned(tree.tokens[:, -nodes:].flatten()),
            _aligned(positions.flatten()),
            _aligned(wanted),
        )
        plan = cache.plan(tree, length, self._windows)
        if long is not None:
            long = _aligned(long[:, None].expand(-1, nodes).flatten())
            torch._dynamo.maybe_mark_dynamic(long, 0)
        for x in (ids, positions, wanted, plan.length, plan.depth, plan.ancestors, plan.table):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        with self.lock, self._attending(ATTENTION_NAME, plan), self._merged or nullcontext():
            logits, hidden = self._run(ids, positions, wanted, plan, long)
        count = rows if only is not None else rows * nodes
        return logits[:count].view(rows, -1, logits.shape[-1]), hidden[:count].view(rows, -1, hidden.shape[-1])

    def read(
        self,
        prompts: Tensor,
        start: Tensor,
        length: Tensor,
        cache: DenseCache | PagedCache,
        kinds: Sequence[AttentionKind],
        most: int | None,
        long: Tensor | None,
        show: Callable[[int, int, Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read prompts on a CPU and return each row's last logits `[B, V]` and hidden `[B, F]`.

        Args:
            prompts: `[B, P]` int64.
            start: `[B]` int64, tokens of each row that the cache holds already.
            length: `[B]` int64, the row's tokens up to which to read.
            cache: receives keys and values.
            kinds: what each layer sees.
            most: tokens of all rows in one forward; None for as many as suit.
            long: `[B]` bool, as for a call.
            show: is told the logits of every token, as in `Target.prefill`.
        """
        last: dict[int, tuple[Tensor, Tensor]] = {}
        for forward in pieces(start.tolist(), length.tolist(), most):
            tokens = torch.cat([prompts[piece.row, piece.first : piece.end] for piece in forward])
            positions = torch.cat([torch.arange(piece.first, piece.end) for piece in forward])
            if self._context is not None:
                positions = positions.clamp(max=self._context - 1)
            counts = [piece.count for piece in forward]
            ends = torch.tensor(counts).cumsum(0) - 1
            plan = PromptPlan(forward, kinds, cache.plan_prefill(forward))
            dense = cache if isinstance(cache, DenseCache) else None
            far = None if long is None else torch.cat([long[piece.row].expand(piece.count) for piece in forward])
            with (
                self.lock,
                self._attending(PROMPT_ATTENTION_NAME, plan),
                by_position(self._slot_readers, positions[None]),
                self._merged or nullcontext(),
            ):
                wanted = ends if show is None else torch.arange(len(tokens))
                found = self._plain(tokens, positions, wanted, plan, far, dense)
            if show is not None:
                for piece, logits in zip(forward, found[0].split(counts), strict=True):
                    show(piece.row, piece.first, logits)
                found = (found[0][ends], found[1][ends])
            last |= {piece.row: (logits, hidden) for piece, logits, hidden in zip(forward, *found, strict=True)}
        logits, hidden = zip(*(last[row] for row in range(len(prompts))), strict=True)
        return torch.stack(logits), torch.stack(hidden)

    def tap(self, layers: Sequence[nn.Module], numbers: tuple[int, ...]) -> None:
        """From the next call on, these layers' outputs stand behind the last hidden states."""
        self._layers, self._numbers = layers, numbers

    @property
    def prepared(self) -> bool:
        """Whether `merge` was called."""
        return self._merged is not None

    def merge(self, forward: Callable[[], object]) -> None:
        """Watch a forward. From the next call on, linear layers that read the same tensor are one product."""
        with linear_calls(self._model) as calls:
            forward()
        self._merged = FusedLinears(self._model, same_inputs(calls))

    def compile(self, compiled: bool = True) -> None:
        """From the next call on, run the forward as torch.compile makes it, or as it is."""
        self._run = torch.compile(self._plain, fullgraph=True, options=OPTIONS) if compiled else self._plain

    def _plain(
        self,
        ids: Tensor,
        positions: Tensor,
        wanted: Tensor,
        plan: Plan | PromptPlan,
        long: Tensor | None,
        cache: DenseCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ids, positions: `[T]`. wanted: `[R]`, tokens to compute the head at. long: `[T]`. Returns `[R, V]` and
        `[R, F]`."""
        self._wanted, self._outputs, self._long = wanted, (), long
        out = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=cache is not None,
            plan=plan,
        )
        # A compiled forward is made anew when this changes; that hooks changed it would not see.
        assert len(self._outputs) == len(self._numbers)
        hidden = join(self._hidden, self._outputs)
        self._hidden = self._wanted = self._long = None
        self._outputs = ()
        return out.logits[0], hidden[0]

    def _tap(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """On the way into the head: leave the tokens that are wanted, and remember them."""
        self._hidden = args[0][:, self._wanted]
        return (self._hidden, *args[1:])

    def _see(self, output: Tensor) -> None:
        self._outputs = (*self._outputs, output[:, self._wanted])

    def _choosing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.rope is None else self.rope.choosing(lambda: self._long[None])

    @contextmanager
    def _attending(self, attention: str, plan: Plan | PromptPlan) -> Iterator[None]:
        before = self._config._attn_implementation
        self._config._attn_implementation = attention
        # A forward over prompts is not compiled, and so may tell whose it is.
        mine: Any = in_this_thread if attention == PROMPT_ATTENTION_NAME else lambda hook: hook
        hook = self._head.register_forward_pre_hook(mine(self._tap))
        running = RUNNING_PLAN.set(plan)
        try:
            with tapped(self._layers, mine(self._see)), self._choosing():
                yield
        finally:
            RUNNING_PLAN.reset(running)
            hook.remove()
            self._config._attn_implementation = before


def _aligned(x: Tensor) -> Tensor:
    """`[M]` padded with zeros to a multiple of `ALIGN`."""
    return torch.nn.functional.pad(x, (0, -len(x) % ALIGN))
