"""The self-test of a model that is being bound: small token trees are compared with plain forwards.

A half-precision model is computed in float32, since its own rounding would hide what a wrong mask or position changes,
and once as it is, which shows that it runs and is not far off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from redrafter.attention.mask import LayerKinds
from redrafter.cache.dense import LayerShape, states_of
from redrafter.cache.paged import KVCache
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.target.drafter_inputs import decoder_stack
from redrafter.target.float32 import in_float32
from redrafter.target.patch import ModelPatch
from redrafter.target.quantization import float8_scheme, is_quantized
from redrafter.target.self_test_trials import (
    MODEL_ERRORS,
    TargetUnderTest,
    Trial,
    far_lengths,
    far_trial,
    near_trial,
    run_trial,
)

__all__ = ["SelfTest"]

MIN_FAR_LAYERS = 4  # layers that a far trial computes at least

NewCache: TypeAlias = Callable[[Sequence[LayerShape], int, int], KVCache]
"""Makes a cache for some layers, rows and slots a row."""


class SelfTest:
    """The trials of one target, for each kind of cache that it may be decoded on.

    Attributes:
        output: Output of one of the model's own plain forwards, with its cache.
    """

    def __init__(self, target: TargetUnderTest, kinds: LayerKinds, longest: int, *, decoded: bool = False):
        """Run the plain forwards of the near trial.

        Args:
            target: What is being bound; its `verify` and `prefill` are tried.
            kinds: What its layers attend to.
            longest: Tokens of the longer row of a near trial.
            decoded: Let the model read what trees are compared with token by token, as in plain decoding.

        Raises:
            CheckpointError: The model's logits are not finite.
        """
        self._target, self._longest = target, longest
        self._context = target.context  # later texts may be longer, where each token's rope is of its own length
        self._near, self.output = near_trial(target, longest, decoded=decoded)
        self._decoded = decoded
        if not bool(self._near.expected.isfinite().all()):
            raise CheckpointError(
                f"{target.name} gives logits that are not finite; its weights are damaged, or its dtype is too narrow "
                "for them"
            )
        by_layer = kinds.by_layer or ()
        self._far_layers = max([MIN_FAR_LAYERS, *(1 + by_layer.index(kind) for kind in set(by_layer))])
        self._native_tolerance = max(_tolerance(target), _RECURRENT if decoded else _EXACT)
        self._wide_tolerance = _RECURRENT_WIDENED if decoded else _WIDENED
        self._test_in_float32 = target.dtype in _HALF and not _may_round_inputs(target)

    def run(self, shapes: Sequence[LayerShape], new_cache: NewCache, *, far: bool = True) -> None:
        """Run every trial on caches of one kind.

        Args:
            shapes: What each layer stores.
            new_cache: Makes a cache.
            far: Run far trials too; they need `shapes` to be what transformers' own cache stores.

        Raises:
            UnsupportedError: The model cannot run a tree, or its logits differ from those of plain forwards.
        """
        self._compare(self._near, new_cache(shapes, 2, self._near.slots), self._native_tolerance)
        if states_of(shapes):  # they come about in other ways when prompts are read whole
            self._compare(self._near, new_cache(shapes, 2, self._near.slots), self._native_tolerance, whole=True)
            far = False  # a far text has keys and values that are random numbers, and no states
        if not self._test_in_float32:
            if far:
                self._run_far(shapes, new_cache, max(self._native_tolerance, _WIDENED))
            return
        wide = [shape.widened() for shape in shapes]
        with in_float32():
            near = _unless_it_fails(lambda: near_trial(self._target, self._longest, decoded=self._decoded)[0])
            if near is not None:
                self._compare(near, new_cache(wide, 2, near.slots), self._wide_tolerance)
                if far:
                    self._run_far(wide, new_cache, _WIDENED)

    def _run_far(self, shapes: Sequence[LayerShape], new_cache: NewCache, allowed: "_Tolerance") -> None:
        """Run far trials, on the first layers alone: long enough to cross the numbers of the config."""
        target, count = self._target, len(shapes)
        kept = min(self._far_layers, count)
        for length in far_lengths(target.config, self._context, shapes[:kept]):
            with ModelPatch() as patch:  # a model that holds its layers in a list is left the first of them
                if (stack := decoder_stack(target.model, count)) is not None:
                    patch.put(vars(stack), "_modules", dict(list(stack._modules.items())[:kept]))
                trial = _unless_it_fails(lambda: far_trial(target, length, shapes[:kept]))  # noqa: B023 -- called here
                if trial is not None:
                    self._compare(trial, new_cache(trial.shapes, 1, trial.slots), allowed)

    def _compare(self, trial: Trial, cache: KVCache, allowed: "_Tolerance", *, whole: bool = False) -> None:
        """Run a trial, and raise `UnsupportedError` where its logits are off by more than is allowed."""
        logits, expected = run_trial(self._target, trial, cache, whole=whole).float(), trial.expected.float()
        error = (logits - expected).std(dim=-1) / expected.std(dim=-1).clamp(min=1e-6)  # [B, N]
        if not bool((error.max() <= allowed.worst) & (error.median() <= allowed.typical)):
            behind = "" if trial.prompts is not None else f" behind {int(trial.length[0])} tokens"
            raise UnsupportedError(
                f"{self._target.name} gives other logits for a token tree than for plain text{behind} (relative error "
                f"{error.max():.2g}); this architecture cannot be verified exactly"
            )


@dataclass(frozen=True, order=True)
class _Tolerance:
    """The most that errors of logits may be, relative to the spread of a node's logits.

    Attributes:
        worst: The most at any node.
        typical: The most at half of the nodes.
    """

    worst: float
    typical: float


# Computed in float32, a half-precision model may still round what it moves between layers, and a GPU may be allowed
# TF32. Random keys and values, as far trials have them, make scores large, and rounding with them: 0.002 on Gemma 2;
# a scale or a window that is off is at 0.02 or more. In its own dtype, a half-precision model may choose another
# expert at a node or two. Where activations are quantised, the least difference carries one over to the next of few
# values: up to 0.18 typically on the boxed base, 40 layers deep; a node that sees what it should not is at 0.8.
_EXACT, _WIDENED = _Tolerance(2e-3, 2e-3), _Tolerance(1e-2, 5e-3)
# Recurrences carry rounding on from token to token: 0.014 at worst on a tiny Nemotron-H; a wrong state is near to 1.
_RECURRENT, _RECURRENT_WIDENED = _Tolerance(1e-2, 5e-3), _Tolerance(5e-2, 2e-2)
_NARROW, _QUANTIZED = _Tolerance(float("inf"), 0.15), _Tolerance(float("inf"), 0.4)
_HALF = (torch.float16, torch.bfloat16)


def _tolerance(target: TargetUnderTest) -> _Tolerance:
    """Return the tolerance of a model in the dtype that it computes in, which may not be that of its logits."""
    if _may_round_inputs(target):
        return _QUANTIZED
    return _NARROW if target.dtype in _HALF else _EXACT


def _may_round_inputs(target: TargetUnderTest) -> bool:
    """Tell whether a model's layers may round their inputs, so that the least difference between them may grow."""
    return is_quantized(target.model.config) or float8_scheme(target.model) == "fp8_dynamic"


def _unless_it_fails(make: Callable[[], Trial]) -> Trial | None:
    """Return a trial, or None where the model's own plain forward cannot run it: in float32, or with few layers."""
    try:
        return make()
    except (*MODEL_ERRORS, NotImplementedError):
        return None
