"""Time one step and its parts (draft, verify, rest), with the lower bounds given by their memory traffic.

A batch is held at one position in the middle of its sequences, so that the same step can be timed repeatedly.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict

import torch

from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.estimates import SHARING_ROWS
from redrafter.drafting.policy import DraftPolicy, FixedTreePolicy
from redrafter.drafting.proposer import Proposer, SearchProposer
from redrafter.engine.call import GenerateCall
from redrafter.engine.engine import Engine
from redrafter.engine.request import Request
from redrafter.errors import CacheFullError, first_line
from redrafter.measure.floors import Bandwidth, slot_bytes
from redrafter.measure.run import PromptIds, Workload, median_ms
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.linear_layers import forward_bytes
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.captured_step import capture
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.scheduler import Scheduler
from redrafter.tree.token_tree import Tree

ALLOCATION_STEPS = 20  # steps that allocations are counted over


class LaunchCheck(TypedDict):
    """The result of `StandingBatch.check`."""

    no_wait: bool
    waited: str | None  # first line of the error at a wait
    allocations: int  # GPU allocations in `steps` steps
    steps: int


class StepParts(TypedDict):
    """An entry of the document's `parts`: times of a step, and floors, which are bytes divided by copy bandwidth."""

    batch_size: int
    asked: int | None  # requested context; None for the prompts' own
    context: int  # committed tokens of the longest row
    beyond: bool  # longer than the model's own context: times are valid, tokens are not
    speculative: bool
    nodes: int
    step_ms: float
    draft_ms: float | None  # proposing the tree; None in plain decoding
    draft_floor_ms: float | None
    verify_ms: float  # the target's forward over the tree
    verify_floor_ms: float
    rest_ms: float  # drawing, accepting, committing, the copy to the host
    kv_bytes: int  # of all committed tokens
    checks: LaunchCheck | None
    host_gap_ms: float | None  # time between steps in a whole run, if measured


class HeadTime(TypedDict):
    """An entry of the document's `heads`."""

    batch_size: int
    ids: int
    draft_ms: float
    floor_ms: float


class OneProposer:
    """The models of an engine with a single proposer, resized to the batch, as a scheduler takes them."""

    def __init__(self, engine: Engine, proposer: Proposer, sized_for: int = SHARING_ROWS):
        """Create the models; `sized_for` is the batch size that the proposer's shared nodes are meant for."""
        self._sized_for = sized_for
        self.target, self.plain, self.proposer, self.draft_model = engine.target, engine.plain, proposer, proposer.model
        self.draft_vocabulary = None if proposer.model is None else engine.draft_vocabulary
        self.rejection_sampling = engine.rejection_sampling
        # Proposers by batch size. Captured steps are cached by the proposer object, so it must be reused.
        self._made: dict[int, Proposer] = {}

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return a policy that drafts with the single proposer in every step."""
        return FixedTreePolicy(
            {size: self._made.setdefault(size, at_size(self.proposer, size, self._sized_for)) for size in sizes}
        )


def at_size(proposer: Proposer, rows: int, sized_for: int = SHARING_ROWS) -> Proposer:
    """Resize a proposer for `sized_for` rows to `rows` rows: shared nodes grow with the batch."""
    if not isinstance(proposer, SearchProposer) or proposer.shared_nodes is None or rows == sized_for:
        return proposer
    return replace(proposer, shared_nodes=proposer.shared_nodes * rows // sized_for)


class StandingBatch:
    """A running batch past its prefill, whose state is restored after each step.

    `tokens` and `longest` are the committed tokens of all rows and of the longest row.
    """

    def __init__(self, batch: RunningBatch, device: torch.device):
        lengths = [len(sequence.tokens) - 1 for sequence in batch.rows]
        self.batch, self.device, self.longest, self.tokens = batch, device, max(lengths), sum(lengths)
        self._ranks = batch.target.ranks
        self.captured = batch.prepare_step()
        self.state, self.cache, self.sampler = self.captured.state, self.captured.cache, self.captured.sampler
        self._length, self._hidden = self.state.length.clone(), self.state.hidden.clone()

    def restore(self) -> None:
        """Restore the state of the position. The next step overwrites cache entries past it."""
        self.state.length.copy_(self._length)
        self.state.hidden.copy_(self._hidden)

    def step_ms(self) -> float:
        """Return the median time of the step in milliseconds, launched as in serving."""
        ms = median_ms(self.captured.replay, self.device, before=self.restore, ranks=self._ranks)
        self.restore()
        return ms

    def part_ms(self, part: Callable[[], object]) -> float:
        """Return the median time of `part` in milliseconds, captured if the step is. `part` must not change state."""
        run = part
        if self.captured.graph is not None:
            # Without capture the launch overhead would dominate a small part.
            run = capture(part, watched=self._ranks.size > 1).replay
        return median_ms(run, self.device, ranks=self._ranks)

    def propose(self, proposer: Proposer) -> Callable[[], Tree]:
        """Return a function that proposes a tree for the step; its noise is drawn in advance and not timed."""
        # Steps draw noise once for draft and verification, so it belongs to neither part.
        noise = self.sampler.noise(self.state.length + 1, proposer.depth + 1)
        return lambda: proposer.propose(self.state, self.sampler, noise, self.cache, None)

    def check(self) -> LaunchCheck | None:
        """Check whether launching the captured step makes the CPU wait for the GPU, and count GPU allocations.

        The step is launched once with torch set to raise an error at a wait, whose message's first line is returned as
        `waited`; then `ALLOCATION_STEPS` times, including the reading of their results. Returns None without a GPU.
        """
        if self.device.type != "cuda":
            return None
        self.restore()
        torch.cuda.synchronize(self.device)
        waited = None
        mode = torch.cuda.get_sync_debug_mode()
        # In this mode torch raises an error wherever the host would wait for the GPU.
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.captured.replay()
        except RuntimeError as error:
            waited = first_line(error)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        counts = []
        for steps in (0, ALLOCATION_STEPS):
            for _ in range(steps):
                self.restore()
                self.captured.replay().wait()
            counts.append(torch.cuda.memory_stats(self.device)["allocation.all.allocated"])
        allocations = counts[1] - counts[0]
        return {"no_wait": waited is None, "waited": waited, "allocations": allocations, "steps": ALLOCATION_STEPS}


@contextmanager
def opened(
    engine: Engine, request: Request, proposer: Proposer, sized_for: int = SHARING_ROWS
) -> Iterator[tuple[Scheduler, GenerateCall]]:
    """Prefill all rows of a request in a new scheduler with a single proposer; the caller runs the steps."""
    with engine.scheduler_for(request, models=OneProposer(engine, proposer, sized_for)) as scheduler:
        call = GenerateCall(request)
        # The caller holds the batch still, which a step launched ahead would move. Rows hold a sequence only once its
        # prompt was read, so prompts that a step could read are read here too.
        scheduler.overlap = scheduler.mixed_prefill = False
        with call.queued(scheduler):
            scheduler.prefill()
            if scheduler.running_set.waiting:
                raise CacheFullError(f"there is no memory for {len(call.rows)} rows at once")
            yield scheduler, call


@contextmanager
def open_standing_batch(
    work: Workload, proposer: Proposer, rows: int, *, context: int | None = None
) -> Iterator[StandingBatch]:
    """Open a batch that is held at one position, and close it when the context exits. Requires inference mode.

    The position is `context` tokens; if None, where some row has decoded half of its new tokens after a prompt of the
    workload.
    """
    work.engine.forget_prefixes()
    texts = work.batches(rows)[0] if context is None else long_texts(work.prompts, rows, context)
    advance = work.max_new_tokens // 2 if context is None else 0
    request = make_request(work, texts, work.max_new_tokens + proposer.depth + 1)
    with opened(work.engine, request, proposer, sized_for=rows) as found:
        scheduler, call = found
        while max(len(row.text) for row in call.rows) < advance:
            scheduler.step()
        yield StandingBatch(scheduler.batch, work.device)
    work.engine.forget_prefixes()


def make_request(work: Workload, texts: PromptIds, new: int, eos: frozenset[int] = frozenset()) -> Request:
    """Create a request for `new` tokens after each text, ended by ids of `eos`, with the sampling of a workload.

    Unlike `generate` it does not check that texts fit the context, since longer ones are timed too.
    """
    rows, lengths = len(texts), [len(text) for text in texts]
    padded = [[0] * (max(lengths) - len(text)) + list(text) for text in texts]
    return Request(
        input_ids=torch.tensor(padded, device="cpu"),
        lengths=lengths,
        limits=[length + new for length in lengths],
        params=[
            SamplingParams(temperature=work.temperature, seed=work.seed + row, stop_token_ids=eos)
            for row in range(rows)
        ],
        adapters=[None] * rows,
        images=[None] * rows,
        device=work.device,
    )


def long_texts(prompts: PromptIds, rows: int, length: int) -> list[list[int]]:
    """Return `rows` texts of `length` tokens, cut from the prompts joined and repeated.

    Each row begins at another token of the joined prompts, so that no two rows share a prefix and so keys and values.
    """
    stream = [token for prompt in prompts for token in prompt]
    return [[stream[(row + i) % len(stream)] for i in range(length)] for row in range(rows)]


@torch.inference_mode()
def measure_parts(work: Workload, bandwidth: Bandwidth, rows: int, asked: int | None, *, speculate: bool) -> StepParts:
    """Time one step of `rows` rows and its parts, after `asked` tokens, or half way through the new tokens if None.

    Returns an entry of the document's `parts`. A floor is bytes divided by copy bandwidth.
    """
    proposer, target = work.proposer(rows, speculate), work.engine.target
    proposer = proposer.without_text or proposer  # copying drafts from the text takes negligible time
    with open_standing_batch(work, proposer, rows, context=asked) as batch:
        step = batch.step_ms()
        propose = batch.propose(proposer)
        tree = propose()
        verify = batch.part_ms(lambda: target.verify(ForwardBatch(tree, batch.state.length, batch.cache)))
        draft = floor = None
        if isinstance(proposer, SearchProposer):
            draft = batch.part_ms(propose)
            floor = bandwidth.ms(proposer.draft_bytes)
        kv = batch.tokens * slot_bytes(target.shapes)
        return {
            "batch_size": rows,
            "asked": asked,
            "context": batch.longest,
            "beyond": target.context is not None and batch.longest + proposer.depth >= target.context,
            "speculative": draft is not None,
            "nodes": proposer.nodes,
            "step_ms": step,
            "draft_ms": draft,
            "draft_floor_ms": floor,
            "verify_ms": verify,
            "verify_floor_ms": bandwidth.ms(forward_bytes(target.model) + kv),
            "rest_ms": step - (draft or 0.0) - verify,
            "kv_bytes": kv,
            "checks": batch.check(),
            "host_gap_ms": None,
        }


@torch.inference_mode()
def measure_head(work: Workload, bandwidth: Bandwidth, rows: int, drafter: DrafterModel) -> HeadTime | None:
    """Time the proposal of a tree by `drafter` instead of the engine's; None if speculation is off at `rows` rows."""
    proposer = work.proposer(rows, speculate=True)
    proposer = proposer.without_text or proposer
    if not isinstance(proposer, SearchProposer):
        return None
    proposer = replace(proposer, drafter=drafter)
    with open_standing_batch(work, proposer, rows) as batch:
        ms = batch.part_ms(batch.propose(proposer))
    ids, floor = drafter.lm_head.out_features, bandwidth.ms(proposer.draft_bytes)
    return {"batch_size": rows, "ids": ids, "draft_ms": ms, "floor_ms": floor}


def random_drafter(drafter: DrafterModel, ids: int) -> DrafterModel:
    """Return a drafter of the same shape with random weights and a head of `ids` ids, for timing only."""
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = None if ids == config.vocab_size else ids
    if hasattr(config, "own_head"):
        config.own_head = True
    # Random weights suffice: the time of a head depends on its shape alone.
    with torch.device("meta"):
        make: Any = type(drafter)
        module: Any = make(config)
    module = module.to(drafter.dtype).to_empty(device=drafter.device).eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.02)
    if module.draft_ids is not None:
        module.draft_ids.copy_(torch.randperm(config.vocab_size)[:ids].sort().values)
    return module
