"""The forward of a packed batch: all rows of a tree as one sequence, with tree attention over a paged cache."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from redrafter.attention import ATTENTION_NAME, RUNNING_PLAN, Plan, tree_attention_forward
from redrafter.features import join, tapped
from redrafter.merge import MergedLinears, linear_calls, same_inputs
from redrafter.paged import PagedCache
from redrafter.rope import SwitchingRope
from redrafter.tree import Tree

__all__ = ["PackedForward"]

ALIGN = 8  # tokens; a forward is padded to a multiple, which matrix products like, and which makes it never one token

OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 4,  # what every layer reads, sines and cosines, is computed once and not in each
    "combo_kernels": True,  # queries and keys are rotated in one launch
}

AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)


class PackedForward:
    """A causal LM's forward over packed trees. Nothing of it stays on the model between calls.

    windows: positions that each layer looks back, 0 for all; see `attention_probe`.

    One compilation serves every batch and tree: only the number of tokens varies, and that is a dynamic dimension.
    """

    def __init__(self, model: Any, head: nn.Module, config: Any, context: int | None, windows: tuple[int, ...] = ()):
        self._model, self._head, self._config, self._context = model, head, config, context
        self._windows = windows
        self._wanted: Any = None  # these three hold something during a call alone
        self._hidden: Any = None
        self._outputs: tuple[Tensor, ...] = ()
        self._layers: Sequence[nn.Module] = ()
        self._numbers: tuple[int, ...] = ()
        self._run: Any = self._plain
        self.rope: SwitchingRope | None = None
        self._long: Any = None
        self._merged: MergedLinears | None = None
        self._lock = threading.RLock()  # what stands on the model during a call must not be taken down by another's end

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
        with self._lock, self._attending(plan), self._merged or nullcontext():
            logits, hidden = self._run(ids, positions, wanted, plan, long)
        count = rows if only is not None else rows * nodes
        return logits[:count].view(rows, -1, logits.shape[-1]), hidden[:count].view(rows, -1, hidden.shape[-1])

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
        self._merged = MergedLinears(self._model, same_inputs(calls))

    def compile(self, compiled: bool = True) -> None:
        """From the next call on, run the forward as torch.compile makes it, or as it is."""
        self._run = torch.compile(self._plain, fullgraph=True, options=OPTIONS) if compiled else self._plain

    def _plain(
        self, ids: Tensor, positions: Tensor, wanted: Tensor, plan: Plan, long: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ids, positions: `[T]`. wanted: `[R]`, tokens to compute the head at. long: `[T]`. Returns `[R, V]` and
        `[R, F]`."""
        self._wanted, self._outputs, self._long = wanted, (), long
        out = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False, plan=plan)
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
    def _attending(self, plan: Plan) -> Iterator[None]:
        before = self._config._attn_implementation
        self._config._attn_implementation = ATTENTION_NAME
        hook = self._head.register_forward_pre_hook(self._tap)
        running = RUNNING_PLAN.set(plan)
        try:
            with tapped(self._layers, self._see), self._choosing():
                yield
        finally:
            RUNNING_PLAN.reset(running)
            hook.remove()
            self._config._attn_implementation = before


def _aligned(x: Tensor) -> Tensor:
    """`[M]` padded with zeros to a multiple of `ALIGN`."""
    return torch.nn.functional.pad(x, (0, -len(x) % ALIGN))
