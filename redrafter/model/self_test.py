"""The self-test of a model that is being bound, which determines the caches on which its token trees are correct.

Small token trees are compared with causal forwards. A *near* trial has two rows of a few tokens, which the model reads
itself. A *far* trial has one row whose committed keys and values are random numbers, enough of them to exceed the
numbers of the config that limit what a position sees: windows, chunks, scales, the end of the context. Only a few of
its tokens are computed, so it is fast.

A half-precision model is tested in float32, since its rounding would hide the effect of a wrong mask or position, and
once in its own dtype, which shows that it runs with a small error.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from redrafter import kernels
from redrafter.cache.dense import CACHE_NAME, DenseCache, cache_argument
from redrafter.cache.kv_cache import KVCache, LayerShape, states_of
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.cache.to_device import on_device
from redrafter.errors import CheckpointError, UnsupportedError, first_line
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.float32_mode import HALF, InFloat32
from redrafter.model.forward_batch import ForwardBatch, Prompts, decoder_stack
from redrafter.model.linear_layers import is_quantized
from redrafter.model.passed_tests import PassedTests
from redrafter.model.patch import MODEL_ERRORS, ModelPatch
from redrafter.model.positions import masks_slots
from redrafter.model.prompt_reader import PromptReader
from redrafter.model.quantized_layers import rounds_inputs
from redrafter.model.supported import Support, stored_shapes
from redrafter.model.tree_forward import BoundModel
from redrafter.tree.accept import Path
from redrafter.tree.token_tree import chain, tree_of

MAX_CHEAP_WINDOW = 64  # positions; prompts of the self-test reach past a window up to this long
# Length of the longer prompt: more than convolutions look back, and such that no piece of a prompt has one token, which
# some mixers compute differently.
MIN_TOKENS_WITH_STATES = 10
TRIAL_SLOTS = 8  # slots that a trial needs after a row's committed tokens
MIN_FAR_LAYERS = 4  # minimum number of layers that a far trial computes
MAX_FAR_BYTES = 1 << 30  # memory of keys and values in one far trial; longer trials are omitted
# Names of config entries whose numbers limit what a position sees.
POSITION_LIMITS = re.compile("window|chunk|original_max|floor|local|keep|block|stride|span|topk")

# Relative noise of a probe's embeddings, and the change of its logits, relative to their spread, above which a model in
# float32 rounds inside its layers. With noise of 1e-6, SmolLM2-135M changes by 1e-6, quantised with NF4 by 0.01, with
# dynamic int8 by 0.1; noise of 1e-5 is enough for the few numbers of a small model.
NOISE, ROUNDING = 1e-5, 1e-3

NewCache: TypeAlias = Callable[[Sequence[LayerShape], int, int], KVCache]
"""Makes a cache for these layers, rows and slots per row."""

_Tolerance: TypeAlias = tuple[float, float]
"""Maximum errors of logits, relative to the spread of a node's logits: at any node, and at half of the nodes."""

# Computed in float32, a half-precision model may still round activations between layers, and a GPU may use TF32. Random
# keys and values, as in far trials, make scores large, and rounding errors with them: 0.002 on Gemma 2; a wrong scale
# or window gives 0.02 or more. In its own dtype, a half-precision model may choose another expert at a node or two.
# Where activations are quantised, the smallest difference changes one to the next of few values: up to 0.18 typically
# on the boxed base, 40 layers deep; a node that sees a token that it should not gives 0.8.
_EXACT, _WIDENED = (2e-3, 2e-3), (1e-2, 5e-3)
# Recurrences accumulate rounding errors: 0.014 at worst on a tiny Nemotron-H; a wrong state gives nearly 1.
_RECURRENT, _RECURRENT_WIDENED = (1e-2, 5e-3), (5e-2, 2e-2)
_NARROW, _QUANTIZED = (float("inf"), 0.15), (float("inf"), 0.4)


@dataclass(frozen=True)
class CacheTrial:
    """A small tree after the committed tokens of B rows, and the logits of causal forwards along its paths.

    Attributes:
        nodes: Ids of the root; of a and b below it, c below a, d below b; of e, which follows the path root, b, d;
            `[6]` int64.
        length: Committed tokens of each row, `[B]` int64.
        prompts: Those tokens, `[B, P]` int64, right-padded; None if their keys and values are random numbers.
        states: Those keys and values by layer, `[1, heads, P, dim]` each, followed by the keys of an indexer, `[1, P,
            dim]`, for a layer with one; else empty.
        expected: Logits of causal forwards at root, a, b, c, d and e, `[B, 6, V]`.
    """

    nodes: Tensor
    length: Tensor
    prompts: Tensor | None
    states: Mapping[int, tuple[Tensor, ...]]
    expected: Tensor


class SelfTest:
    """The trials of one target, for each kind of cache.

    Attributes:
        output: Output of one causal forward of the model, with its cache.
        rounding: Change of the logits of a model in float32, relative to their spread, when its embeddings change by
            `NOISE`; 0 for other dtypes.
    """

    def __init__(self, target: BoundModel, reader: PromptReader):
        """Run the causal forwards of the near trial.

        Args:
            target: The target that is being bound.
            reader: Its reader of prompts, which is tested with its forwards.

        Raises:
            CheckpointError: The model's logits are not finite.
        """
        # With recurrent layers, the reference is read token by token, as in undrafted decoding.
        kinds, self._decoded = target.traits.kinds, bool(target.traits.mixers)
        window = min((kind.window for kind in kinds.by_name.values() if kind.window), default=0)
        longest = window + 3 if window <= MAX_CHEAP_WINDOW else 5
        self._longest = max(longest, MIN_TOKENS_WITH_STATES) if self._decoded else longest
        self._target, self._reader = target, reader
        self._context = target.context  # before a dynamic RoPE may extend it
        self._near, self.output = self._near_trial()
        self._wide_near: CacheTrial | None = None
        self._far_logits: dict[tuple[int, tuple[LayerShape, ...]], Tensor] = {}  # of causal forwards
        if not bool(self._near.expected.isfinite().all()):
            raise CheckpointError(
                f"{target.name} gives logits that are not finite; its weights are damaged, or too large for its dtype"
            )
        self.rounding = self._measure_rounding() if target.dtype == torch.float32 else 0.0
        by_layer = kinds.by_layer or ()
        self._far_layers = max([MIN_FAR_LAYERS, *(1 + by_layer.index(kind) for kind in set(by_layer))])
        # Where layers round their inputs, rounding may amplify the smallest difference.
        rounding = self.rounding > ROUNDING or is_quantized(target.model.config) or rounds_inputs(target.model)
        # The dtype in which the model computes may differ from the dtype of its logits.
        tolerance = _QUANTIZED if rounding else _NARROW if target.dtype in HALF else _EXACT
        self._native_tolerance = max(tolerance, _RECURRENT if self._decoded else _EXACT)
        self._wide_tolerance = _RECURRENT_WIDENED if self._decoded else _WIDENED
        # Weights that are gathered for each layer would be widened while they are gathered.
        self._test_in_float32 = target.dtype in HALF and not rounding and not _is_spread(target.model)

    def run_trials(self, shapes: Sequence[LayerShape], new_cache: NewCache, *, far: bool = True) -> None:
        """Run every trial on caches of one kind.

        Args:
            shapes: Shape of each layer.
            new_cache: Makes a cache.
            far: Also run far trials, for which `shapes` must be what transformers' own cache stores.

        Raises:
            UnsupportedError: The model cannot run a tree, or its logits differ from causal forwards.
        """
        self._compare(self._near, shapes, new_cache, self._native_tolerance)
        if states_of(shapes):  # a prompt that is read whole computes them by other code
            self._compare(self._near, shapes, new_cache, self._native_tolerance, whole=True)
            far = False  # a far trial has random keys and values, and no states
        if not self._test_in_float32:
            if far:
                self._run_far(shapes, new_cache, max(self._native_tolerance, _WIDENED))
            return
        wide = [shape.widened() for shape in shapes]
        with InFloat32():
            try:
                self._wide_near = self._wide_near or self._near_trial()[0]
            except (*MODEL_ERRORS, NotImplementedError):  # its own causal forward does not run in float32
                return
            self._compare(self._wide_near, wide, new_cache, self._wide_tolerance)
            if far:
                self._run_far(wide, new_cache, _WIDENED)

    def _near_trial(self) -> tuple[CacheTrial, object]:
        """Make a near trial: the model reads each prompt with each of the tree's two paths after it.

        Also returns the output of the causal forward of the second prompt, with the model's own cache.
        """
        target, longest = self._target, self._longest
        ids = self._ids(2 * longest + 6)
        prompts, nodes = ids[: 2 * longest].view(2, longest), ids[2 * longest :]
        expected, lengths = [], [longest, longest - 2]
        for row, n in enumerate(lengths):
            prompt, paths = prompts[row, :n].expand(2, n), _paths(nodes)
            if self._decoded:  # some mixers give slightly different numbers for several tokens at once
                logits, out = _decoded(target.model, prompt, paths)
            else:
                text = torch.cat([prompt, paths], dim=1)
                out = target.model(input_ids=text, use_cache=True, **_positions(target.model, text))
                logits = out.logits[:, n:]
            expected.append(_at_nodes(logits.to(target.device)))
        length = torch.tensor(lengths, device=target.device)
        return CacheTrial(nodes=nodes, length=length, prompts=prompts, states={}, expected=torch.stack(expected)), out

    def _measure_rounding(self) -> float:
        """Return by how much of their spread the logits of a prompt change when its embeddings change by `NOISE`."""
        target, ids = self._target, self._ids(2 * self._longest)[None]
        random = torch.Generator().manual_seed(0)  # equal noise on all ranks

        def disturb(module: object, inputs: object, embedded: Tensor) -> Tensor:
            return embedded * (1 + NOISE * torch.randn(embedded.shape, generator=random).to(embedded))

        def logits() -> Tensor:
            out: Tensor = target.model(input_ids=ids, use_cache=True, **_positions(target.model, ids)).logits
            return out.float()

        undisturbed, hook = logits(), target.embedding.register_forward_hook(disturb)
        try:
            return float((logits() - undisturbed).std() / undisturbed.std().clamp(min=1e-6))
        finally:
            hook.remove()

    def _run_far(self, shapes: Sequence[LayerShape], new_cache: NewCache, allowed: _Tolerance) -> None:
        """Run far trials, on the first layers only: long enough to exceed the limits of the config."""
        target, count = self._target, len(shapes)
        shapes = shapes[: min(self._far_layers, count)]
        for length in far_lengths(target.config, self._context, shapes):
            with ModelPatch() as patch:  # keeps only the first layers of a model that holds its layers in a list
                if (stack := decoder_stack(target.model, count)) is not None:
                    patch.put(vars(stack), "_modules", dict(list(stack._modules.items())[: len(shapes)]))
                try:
                    trial = self._far_trial(length, shapes)
                except (*MODEL_ERRORS, NotImplementedError):  # its own causal forward does not run with fewer layers
                    continue
                self._compare(trial, shapes, new_cache, allowed)

    def _far_trial(self, length: int, shapes: Sequence[LayerShape]) -> CacheTrial:
        """Make a trial of one row of `length` committed tokens, whose keys and values are random numbers.

        Their memory is not kept, but the expected logits are, for a trial on another cache.
        """
        target, nodes, past = self._target, self._ids(6), DynamicCache()
        past.layers.extend(DynamicIndexedLayer() if shape.extra_dim else DynamicLayer() for shape in shapes)
        states: dict[int, tuple[Tensor, ...]] = {}
        for index, shape in enumerate(shapes):
            if not shape.heads:
                continue
            random = torch.Generator().manual_seed(index)  # equal numbers in every call
            sizes: list[tuple[int, ...]] = [(1, shape.heads, length, dim) for dim in (shape.key_dim, shape.value_dim)]
            sizes += [(1, length, shape.extra_dim)] if shape.extra_dim else []
            states[index] = tuple(torch.randn(x, generator=random).to(shape.device, shape.dtype) for x in sizes)
        if (key := (length, tuple(shapes))) not in self._far_logits:
            for index, (keys, values, *extra) in states.items():
                # They are passed to the cache as by a model.
                past.update(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), index)
                if extra:
                    past.update_indexer(extra[0].expand(2, -1, -1), index)
            positions = torch.arange(length, length + 4, device=target.device)[None].expand(2, 4)
            given = {cache_argument(target.model.forward) or CACHE_NAME: past, "use_cache": True}
            out = target.model(input_ids=_paths(nodes), position_ids=positions, **given)
            self._far_logits[key] = _at_nodes(out.logits.to(target.device))[None]
        lengths = torch.tensor([length], device=target.device)
        return CacheTrial(nodes=nodes, length=lengths, prompts=None, states=states, expected=self._far_logits[key])

    def _ids(self, count: int) -> Tensor:
        return (torch.arange(count, device=self._target.device) * 7919 + 11) % self._target.config.vocab_size

    def _compare(
        self, trial: CacheTrial, shapes: Sequence[LayerShape], new: NewCache, allowed: _Tolerance, whole: bool = False
    ) -> None:
        """Run a trial, and raise `UnsupportedError` if the errors of its logits exceed `allowed`."""
        cache = new(shapes, len(trial.length), int(trial.length.max()) + TRIAL_SLOTS)
        logits = self._logits_of(trial, cache, whole=whole).float()
        expected = trial.expected.float()
        error = (logits - expected).std(dim=-1) / expected.std(dim=-1).clamp(min=1e-6)  # [B, N]
        if not bool((error.max() <= allowed[0]) & (error.median() <= allowed[1])):
            after = "" if trial.prompts is not None else f" after {int(trial.length[0])} tokens"
            raise UnsupportedError(
                f"{self._target.name} gives other logits for a token tree than for plain text{after} (relative error "
                f"{error.max():.2g}); this architecture cannot be verified exactly"
            )

    def _logits_of(self, trial: CacheTrial, cache: KVCache, *, whole: bool) -> Tensor:
        """Return the logits `[B, 6, V]` of a trial's tree on an empty cache: read, verify, commit, verify.

        Prompts are read in one forward if `whole`, else in several, as long ones are. Raises `UnsupportedError` if the
        model cannot run a tree.
        """
        root, a, b, c, d, e = trial.nodes
        rows = len(trial.length)
        device = self._target.device
        forward = self._reader.forward_on(cache)
        tokens = torch.stack([root, a, b, c, d]).expand(rows, 5)
        parents, depth = (torch.tensor(x, device=device).expand(rows, 5) for x in ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2]))
        try:
            if trial.prompts is None:
                cache.fill_first_slots(trial.states.items())
            else:
                most = None if whole else trial.prompts.shape[1] - trial.prompts.shape[1] // 5
                self._reader.read_prompts(
                    Prompts(trial.prompts, [0] * rows, trial.length.tolist(), cache), max_tokens=most
                )
            tree = tree_of(tokens, parents, depth, max_depth=2)
            logits = forward(ForwardBatch(tree, trial.length, cache))[0]
            path = Path(torch.tensor([0, 2, 4], device=device).expand(rows, 3), torch.full_like(trial.length, 2))
            cache.commit(trial.length, path.nodes)
            if cache.states is not None:
                cache.states.commit(trial.length, path, torch.ones_like(trial.length, dtype=torch.bool))
            after = forward(ForwardBatch(chain(e.expand(rows, 1)), trial.length + 3, cache))[0]
        except MODEL_ERRORS as error:
            raise UnsupportedError(f"{self._target.name} cannot run a token tree: {first_line(error)}") from error
        return torch.cat([logits, after], dim=1)


def _decoded(model: PreTrainedModel, prompts: Tensor, paths: Tensor) -> tuple[Tensor, object]:
    """Return the logits along paths `[B, T]` that are read token by token after prompts, and the last output."""
    argument = cache_argument(model.forward)
    assert argument is not None, "a model with states takes a cache"
    out = model(input_ids=prompts, use_cache=True, **_positions(model, prompts))
    logits = []
    for offset, token in enumerate(paths.unbind(1)):
        given = {argument: out[argument]} | _positions(model, token[:, None], prompts.shape[1] + offset)
        out = model(input_ids=token[:, None], use_cache=True, **given)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), out


def _positions(model: Any, ids: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Return the argument in which `model.generate` passes the positions of `[B, T]` tokens from `first` on.

    Without it, a model may count from another number, as RoBERTa does. A model without such an argument gets none.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).expand(ids.shape)
    try:
        prepared = model.prepare_inputs_for_generation(ids, position_ids=positions, is_first_iteration=first == 0)
    except MODEL_ERRORS:  # remote code may need more arguments; tokens after the first ones need positions anyway
        prepared = {"position_ids": positions} if first else {}
    return {name: value for name, value in prepared.items() if name == "position_ids" and value is not None}


def far_lengths(config: PretrainedConfig, context: int | None, shapes: Sequence[LayerShape]) -> list[int]:
    """Return the lengths of committed tokens at which to run far trials, at most two, as far as memory allows.

    One exceeds every number of the config that limits what a position sees; one is just before the end of the context.

    Args:
        config: Config of the model's decoder.
        context: Positions that the model distinguishes; None for no limit.
        shapes: Shape of each layer.
    """
    # For two rows of a causal forward, and one of a tree.
    slot_bytes = 3 * sum(shape.heads * (shape.key_dim + shape.value_dim) * 4 for shape in shapes)
    if not slot_bytes:
        return []  # no layer looks back
    longest = MAX_FAR_BYTES // slot_bytes
    if context is not None:
        longest = min(longest, context - 4)
    past_limits = [limit + 2 for limit in _position_limits(config.to_dict()) if limit + 2 <= longest]
    ends = [context - 4] if context is not None and context - 4 == longest else []
    return sorted({max(past_limits, default=0), *ends} - {0})


def _position_limits(entries: Mapping[str, object], inside: bool = False) -> Iterator[int]:
    """Yield the positive integers of a config whose name, or that of an entry around them, is in `POSITION_LIMITS`."""
    for name, value in entries.items():
        matches = inside or bool(POSITION_LIMITS.search(str(name)))
        if isinstance(value, Mapping):
            yield from _position_limits(value, matches)
        elif isinstance(value, int) and not isinstance(value, bool) and matches and value > 0:
            yield value


def _paths(nodes: Tensor) -> Tensor:
    """Return the two paths of a trial's tree: root, a, c, e and root, b, d, e, `[2, 4]`."""
    return nodes[torch.tensor([[0, 1, 3, 5], [0, 2, 4, 5]], device=nodes.device)]


def _at_nodes(logits: Tensor) -> Tensor:
    """Pick the logits at root, a, b, c, d and e, `[6, V]`, from those along the two paths, `[2, 4, V]`."""
    in_a, in_b = logits
    return torch.stack([in_b[0], in_a[1], in_b[1], in_a[2], in_b[2], in_b[3]])


def _is_spread(model: object) -> bool:
    """Return whether FSDP has spread a model over processes, and gathers the weights of each layer for its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a while to import
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


class CacheSupport:
    """The caches on which a model's token trees are correct.

    Attributes:
        shapes: Shape of each layer on a dense cache.
        rounding: The relative change of logits that `SelfTest` measured, above `ROUNDING`; 0 for a model without.
    """

    def __init__(self, bound: BoundModel, reader: PromptReader, passed: PassedTests):
        """Run the self-test on dense caches, and choose the fastest correct way to use them.

        Args:
            bound: The model that is being bound.
            reader: Its reader of prompts, which is configured accordingly.
            passed: The tests that it has passed before, which are not run again.

        Raises:
            UnsupportedError: The model is correct on no cache.
        """
        self._bound, self._reader, self._passed, traits = bound, reader, passed, bound.traits
        found = passed.find("dense", "masks", "contiguous")
        if found is None:
            output = self._self_test.output
        else:
            one = torch.zeros(1, 1, dtype=torch.long, device=bound.device)
            output = bound.model(input_ids=one, use_cache=True, **_positions(bound.model, one))
        states = [state for mixer in traits.mixers for state in mixer.states]
        self.shapes = stored_shapes(output, bound.config, bound.name, states)
        if found is not None:
            reader.masks_on_dense, self._contiguous, self.rounding = found["masks"], found["contiguous"], 0.0
            return
        self.rounding = self._self_test.rounding if self._self_test.rounding > ROUNDING else 0.0
        self._contiguous = False
        on_cpu = all(shape.device.type == "cpu" for shape in self.shapes)
        reader.masks_on_dense = not (traits.attention.kinds and on_cpu)
        # Try ways from the fastest: without masks for prompts, then with masks, then with copied keys.
        while True:
            try:
                self._self_test.run_trials(self.shapes, self.new_dense)
                if not self.rounding:  # which is to be reported at each load
                    passed.keep("dense", masks=reader.masks_on_dense, contiguous=self._contiguous)
                return
            except UnsupportedError as error:
                if reader.reads_without_masks(self.new_dense(self.shapes, 1)):
                    reader.masks_on_dense = True  # its attention cannot be replaced
                elif isinstance(error.__cause__, RuntimeError) and not self._contiguous:
                    self._contiguous = True
                else:
                    raise

    @cached_property
    def _self_test(self) -> SelfTest:
        return SelfTest(self._bound, self._reader)

    def new_dense(self, shapes: Sequence[LayerShape], rows: int, slots: int = 0) -> DenseCache:
        """Return an empty dense cache for layers with these shapes, for `rows` rows of this number of slots."""
        cache = DenseCache(shapes, rows, self._contiguous)
        if slots:
            cache.reserve(slots)
        return cache

    @cached_property
    def paged_shapes(self) -> list[LayerShape]:
        """Shape of each layer on a paged cache: the keys and values that its attention function receives.

        Models with latent attention store other tensors in transformers' own caches.
        """
        seen = self._bound.traits.attention.shapes
        nothing = next(iter(seen.values()), self.shapes[0]).storing_nothing()
        return [replace(seen.get(layer, nothing), states=shape.states) for layer, shape in enumerate(self.shapes)]

    @cached_property
    def paged(self) -> Support:
        """Return whether the model can be decoded on a paged cache. The first access may run the self-test on one."""
        bound, probe = self._bound, self._bound.traits.attention
        if len({shape.device for shape in self.shapes}) > 1:
            return Support("it is spread over several devices; load it on one with device='cuda'")
        if bound.device.type == "cuda" and not kernels.TRITON:
            return Support("Triton is not installed; pip install triton")
        if _is_spread(bound.model):
            # Paged decoding calls layers outside of the hooks that gather their weights.
            return Support("its layers are spread over several processes")
        attends = any(shape.heads for shape in self.shapes)
        if attends and (probe.failure is not None or not probe.shapes):
            reason = probe.failure or "no layer attends through transformers' attention interface"
            return Support(f"its attention cannot be replaced: {reason}")
        if any(shape.extra_dim for shape in self.shapes):
            return Support("an indexer chooses what its layers attend to, and the paged cache cannot store its keys")
        if attends and self._bound.traits.kinds.by_layer is None:
            return Support("what its layers see is not known")
        if masks_slots(self._bound.traits.slot_readers):  # in the model's own code
            return Support("its attention takes positions from slots of the cache")
        if self._passed.find("paged") is not None:
            return Support()
        try:
            with torch.no_grad(), on_device(bound.device):
                stored = [replace(shape, source=None) for shape in self.paged_shapes]
                self._self_test.run_trials(self.paged_shapes, self._new_paged, far=stored == self.shapes)
        except UnsupportedError as error:
            return Support(f"its attention cannot be replaced: {error}")
        if not self.rounding:
            self._passed.keep("paged")
        return Support()

    def _new_paged(self, shapes: Sequence[LayerShape], rows: int, slots: int) -> PagedCache:
        blocks = -(-slots // BLOCK_SIZE)
        table = torch.arange(1, 1 + rows * blocks, dtype=torch.int32, device=self._bound.device).view(rows, blocks)
        home = torch.arange(1, 1 + rows, device=table.device)
        return PagedCache(KVCachePool(shapes, 1 + rows * blocks, rows), table, home)
