"""Prefill: which prompts a round reads, how many tokens of each, and the forwards that read them into the KV cache.

Prompts have forwards of their own, or are read by a step's forward with the trees (mixed prefill).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.attention.tree_plan import ChunkEnds, PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import stack_block_tables
from redrafter.cache.to_device import to_device
from redrafter.features import ADAPTERS, RECURRENT_STATES, ROPE_BY_LENGTH, Feature
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.forward_batch import Prompts
from redrafter.model.images import ImagePrompt
from redrafter.model.target import Target
from redrafter.scheduler.draft_reader import stack_tokens
from redrafter.scheduler.logprobs import score_prompt
from redrafter.scheduler.row_caches import CachePair, RowCaches
from redrafter.scheduler.sequence import TokenSequence
from redrafter.scheduler.sequence_blocks import tables_of
from redrafter.scheduler.waiting_queue import Limits

TARGET_SECONDS = 0.25  # duration of a prefill forward; running and new sequences wait as long for it
# Tokens of the first forward, before any was measured, by type of device.
FIRST_FORWARD_TOKENS = {"cpu": 512, "cuda": 2048}
MIN_FORWARD_TOKENS = 64  # tokens of a forward on any machine, however slow; fewer would take about as long
MAX_GROWTH, MIN_GROWTH = 2.0, 0.25  # factors by which one measurement may change the size of the next forward

Chunk = tuple[TokenSequence, int]  # a sequence, and how many more tokens of its prompt are read

ReadDrafts = Callable[[Sequence[TokenSequence], Prompts, KVCache | None], None]
"""Reads chunks of the prompts of sequences into a draft model's cache; None for no draft model."""


class PromptStep(NamedTuple):
    """Describes which chunks of prompts a step reads, and how many chunks its buffers have room for."""

    chunks: Sequence[Chunk] = ()
    room: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the forward computes for prompts, with padding."""
        return self.room * TOKENS_PER_CHUNK


NO_PROMPTS = PromptStep()


class PrefillPace:
    """How many tokens a prefill forward may have, so that it takes about `TARGET_SECONDS`.

    The number follows the measured durations, since these depend on the machine, the model and the lengths of the
    sequences. The tokens that are drawn do not depend on it.

    Attributes:
        tokens: Tokens that the next forward may have.
    """

    def __init__(self, max_num_tokens: int, device: str = "cpu"):
        """Begin at `FIRST_FORWARD_TOKENS`."""
        self._max_num_tokens = max_num_tokens
        self.tokens = min(FIRST_FORWARD_TOKENS.get(device, FIRST_FORWARD_TOKENS["cuda"]), max_num_tokens)

    def measure(self, tokens: int, seconds: float) -> None:
        """Adapt the size of the next forward to the measured duration of one over this number of tokens."""
        fitting = tokens * TARGET_SECONDS / max(seconds, 1e-6)
        if seconds <= TARGET_SECONDS and 2 * tokens < self.tokens:
            return  # a fast forward over few tokens says nothing about one over many
        # One measurement may be off, as where another program ran, so it changes the size by a bounded factor.
        fitting = min(max(fitting, MIN_GROWTH * self.tokens), MAX_GROWTH * self.tokens)
        self.tokens = min(max(round(fitting), MIN_FORWARD_TOKENS), self._max_num_tokens)


def choose_chunks(prefilling: Sequence[TokenSequence], budget: int, padded: bool, chunked: bool) -> list[list[Chunk]]:
    """Choose which prompts are read next, and how many tokens of each.

    Half of a forward is for the prompts that have the fewest tokens left, so that a short one never waits for the
    chunks of a long one. The rest goes to the sequences admitted first, so that a long prompt always advances.
    Prompts of lower priority numbers come first in both halves.

    With `padded`, each sequence costs as many tokens as the longest one. Without `chunked`, prompts are read
    whole, the one that was admitted first however long it is: in a second forward where it is longer than `budget`.
    """
    counts = dict[TokenSequence, int]()
    total = longest = 0

    def add(sequence: TokenSequence, budget: int) -> None:
        """Add as many tokens of a prompt as a forward of `budget` has room for; without `chunked`, all or none."""
        nonlocal total, longest
        before = counts.get(sequence, 0)
        free = budget - total + before
        # Every row of a padded forward costs as many tokens as the longest one.
        if padded:
            free = budget // (len(counts) + (sequence not in counts))
            if longest > free:
                return
        left = sequence.prefill_length - sequence.prefilled
        count = min(left, free)
        if count > before and (chunked or count == left):
            counts[sequence], total, longest = count, total + count - before, max(longest, count)

    # Those of a priority are in the order of their admission.
    prefilling = sorted(prefilling, key=lambda sequence: sequence.request.priority)
    # The first half of the budget goes to the shortest prompts.
    for sequence in sorted(prefilling, key=lambda s: (s.request.priority, s.prefill_length - s.prefilled)):
        add(sequence, max(budget // 2, 1))
    for sequence in prefilling:
        # The second pass may also enlarge chunks of the first one, with tokens that short prompts left over.
        add(sequence, budget)
    forwards = [sorted(counts.items(), key=lambda chunk: chunk[0].admission.arrival)] if counts else []
    oldest = prefilling[0]
    # Without chunks, a prompt longer than the budget would never fit, so the oldest one gets a separate forward.
    if oldest not in counts and not chunked:
        forwards.append([(oldest, oldest.prefill_length - oldest.prefilled)])
    return forwards


def chunks_that_end_together(sequences: Sequence[TokenSequence], budget: int) -> list[Chunk]:
    """Choose chunks of prompts in their order, so that one forward reads the last tokens of all, if it can."""
    left = _left(sequences)
    # The last token of each prompt is read last, unless all are read now or only last tokens are left.
    kept = int(left > budget and left > len(sequences))
    chunks: list[Chunk] = []
    for sequence in sequences:
        count = min(sequence.prefill_length - sequence.prefilled - kept, budget)
        if count:
            chunks.append((sequence, count))
            budget -= count
    return chunks


def padded_tokens(chunks: Sequence[Chunk], padded: bool) -> int:
    """Count the tokens of a forward, including padding."""
    counts = [count for _, count in chunks]
    return len(counts) * max(counts) if padded else sum(counts)


# Chunks that the buffers of a step have room for, of TOKENS_PER_CHUNK tokens each on average, the smallest first.
ROOMS = (4, 8, 16)
# The same for a step without rows, which delays no running sequence. All that it computes is a prompt's first token,
# and each size is captured once, so there are many: on an H200 the products of an 8B take 4.6 ms with 160 tokens, 5.7
# with 256, 6.7 with 320 and 9.4 with 512.
ROOMS_ALONE = (4, 8, 10, 12, 16, 20, 24, 32)
# The same for at least `COMPUTE_BOUND_ROWS` rows, whose products are compute-bound: padding costs as much as prompts.
# The sizes above `USUAL_ROOM` are for a backlog of twice as many tokens: rows that draft end three times as soon, and
# those that replace them would wait for their prompts. Simulated with the times of an 8B on an H200, 64 streams with
# prompts of 450 tokens that draft 1.7 of 2.7 tokens: 17 % more tokens/s, and first tokens after 60 ms instead of 190.
ROOMS_OF_MANY = (4, 8, 12, 16, 20, 24, 32, 56)
USUAL_ROOM = 24
COMPUTE_BOUND_ROWS = 17  # their steps are captured for 32 rows or more
# The same for a bulk call. Where answers are short, as many tokens of prompts are read as are drawn, or more: with at
# most 384 a step, half of 512 slots would hold a prompt that is being read. Few sizes, as each is captured.
ROOMS_OF_BULK = (16, 32, 64, 96)
BULK_ROWS = 64  # in fewer rows, sequences end and begin one by one
# Prompts that end in the same step: where hundreds begin at once, the first ones do not wait for the last.
MAX_GROUP = 32
# Tokens that one step without rows reads at once. Prompts of at most as many tokens on average are read by steps,
# however many there are: a forward over all of them is no faster, and its rows would begin, and often end, together.
SHORT_PROMPT = ROOMS_ALONE[-1] * TOKENS_PER_CHUNK
# Products of as many tokens take longer than those of more. Measured with cuBLAS 13 on an H200: 12.9 ms for the linear
# layers of an 8B with 448 tokens, 9.4 ms with 480 and with 512.
SLOW_TOKENS = range(417, 480)


def rooms_of(rows: int, step_nodes: Collection[int], *, bulk: bool = False, left: int | None = None) -> Sequence[int]:
    """Return the sizes of the buffers, in chunks, that a step of `rows` rows may have.

    Sizes are left out with which a step of any count in `step_nodes` would have a number of tokens in `SLOW_TOKENS`,
    since the policy chooses the nodes of a step after its buffers are chosen, and those that are too large where only
    `left` tokens of prompts wait; None for any number.
    """
    if rows < COMPUTE_BOUND_ROWS:
        return ROOMS if rows else ROOMS_ALONE
    usual = [room for room in ROOMS_OF_MANY if left is None or left >= least_backlog(room)]
    rooms = ROOMS_OF_BULK if bulk and rows >= BULK_ROWS else usual
    return [room for room in rooms if not any(nodes + room * TOKENS_PER_CHUNK in SLOW_TOKENS for nodes in step_nodes)]


def least_backlog(room: int) -> int:
    """Return how many tokens of prompts have to wait for a step of many rows to have room for `room` chunks."""
    return 2 * room * TOKENS_PER_CHUNK if room > USUAL_ROOM else 0


def rope_length(target: Target, sequence: TokenSequence) -> int:
    """Return a lower bound on the length that selects RoPE frequencies of a prompt that may be read in chunks."""
    prompt = len(sequence.request.prompt)
    return prompt if target.rope is None else target.rope.prompt_length(prompt, sequence.prefill_length)


class ChunkBuffers:
    """Buffers for chunks of prompts at fixed addresses, which captured steps read."""

    def __init__(self, blocks: int, target: Target):
        """Make empty buffers for prompts that a model reads. blocks: width of the block tables."""
        self._by_room = {
            room: PromptChunks.room(room, blocks, target.device)
            for room in {*ROOMS_ALONE, *ROOMS_OF_MANY, *ROOMS_OF_BULK}
        }
        self._blocks, self._target = blocks, target

    def load(self, chunks: Sequence[Chunk], room: int) -> PromptChunks:
        """Write chunks of prompts into the buffers of a size."""
        buffers = self._by_room[room]
        tokens, starts, lengths = list[int](), [0], list[int]()
        inputs: dict[Feature, list[int]] = {feature: [] for feature in buffers.inputs}
        for sequence, count in chunks:
            tokens += sequence.tokens[sequence.prefilled : sequence.prefilled + count]
            starts.append(len(tokens))
            lengths.append(sequence.prefilled)
            # RoPE frequencies may depend on the length of the whole prompt, which a chunk alone does not show.
            given = sequence.inputs | {ROPE_BY_LENGTH: rope_length(self._target, sequence)}
            for feature, numbers_of in inputs.items():
                numbers_of.append(given[feature])
        empty = room - len(chunks)
        # Sizes are those of the buffers, so that one captured step reads any chunks that fit.
        padding = [0] * (len(buffers.tokens) - len(tokens))
        ends = starts[-1:] * empty
        parts = [tokens + padding, starts + ends, lengths, *inputs.values()]
        device, sizes = buffers.tokens.device, [len(part) for part in parts]
        numbers = to_device(list(chain.from_iterable(parts)), device, torch.long).split(sizes)  # one copy
        written = buffers.tokens, buffers.starts, buffers.lengths, *buffers.inputs.values()
        for buffer, part in zip(written, numbers, strict=True):
            buffer[: len(part)] = part
        tables = tables_of([sequence for sequence, _ in chunks])
        buffers.table[: len(tables)] = stack_block_tables(tables, device, self._blocks)
        return buffers


@dataclass(frozen=True)
class PrefilledRows:
    """Sequences whose prompts are completely in the cache, and the target's outputs at their last tokens.

    Attributes:
        sequences: B sequences.
        tokens: Their tokens, padded at the end by one 0 at least, `[B, T]` int64.
        lengths: How many of these are in the cache, `[B]` int64.
        logits: `[B, V]`.
        hidden: `[B, F]`.
        caches: The keys and values of the forward.
        rows: The row of each sequence in them.
    """

    sequences: Sequence[TokenSequence]
    tokens: Tensor
    lengths: Tensor
    logits: Tensor
    hidden: Tensor
    caches: CachePair
    rows: Sequence[int]

    def at(self, rows: Sequence[int]) -> "PrefilledRows":
        """Return a subset of the rows, with tokens as wide as the longest of them needs."""
        if len(rows) == len(self.sequences):
            return self
        index = to_device(rows, self.tokens.device, torch.long)
        sequences = [self.sequences[row] for row in rows]
        # The forward may also have read a chunk of a prompt that is longer than all buffers of the batch.
        width = 1 + max((sequence.prefill_length for sequence in sequences), default=0)
        return replace(
            self,
            sequences=sequences,
            tokens=self.tokens[:, :width].index_select(0, index),
            lengths=self.lengths.index_select(0, index),
            logits=self.logits.index_select(0, index),
            hidden=self.hidden.index_select(0, index),
            rows=[self.rows[row] for row in rows],
        )


class Prefiller:
    """Reads the prompts of admitted sequences, as many tokens a round as its pace and the limits allow."""

    def __init__(self, target: Target, draft_model: Target | None, limits: Limits, *, same_ids: bool = True):
        """Read with a target, and a draft model if there is one; with `same_ids`, its ids are the target's."""
        self._target, self._draft_model, self._limits, self._same_ids = target, draft_model, limits, same_ids
        # A CPU reads rows one after the other, so padding costs it nothing.
        self.padded = target.device.type != "cpu" and not target.varlen.ok
        self.restart_pace()

    def restart_pace(self) -> None:
        """Forget how long forwards took."""
        self.pace = PrefillPace(self._limits.max_num_tokens, self._target.device.type)

    def choose(self, sequences: Sequence[TokenSequence], step_nodes: Collection[int]) -> list[list[Chunk]]:
        """Choose what the forwards of one round read.

        Sequences whose prompts are scored are read apart from others, which need only the logits of their last tokens.
        A prompt with images is read whole, in its own forward; where forwards have a pace, one of them a round.
        The round's step uses the most of `step_nodes` of the budget of one forward. Returns the chunks of each forward.
        """
        seeing = [sequence for sequence in sequences if sequence.request.images is not None]
        forwards = [[(sequence, sequence.prefill_length)] for sequence in seeing[: 1 if self._limits.paced else None]]
        most = self._limits.max_num_tokens - max(step_nodes)
        chunked = self._limits.chunked
        budget = max(min(most, self.pace.tokens) if chunked and self._limits.paced else most, BLOCK_SIZE)
        texts = [sequence for sequence in sequences if sequence.request.images is None]
        kinds = [[sequence for sequence in texts if sequence.needs_scores is scored] for scored in (False, True)]
        # Each kind gets a forward in the same round, so together they may take no longer than one.
        share = max(budget // max(sum(map(bool, kinds)), 1), BLOCK_SIZE)
        for kind in filter(None, kinds):
            forwards += choose_chunks(kind, share, self.padded, chunked)
        return forwards

    def forward(self, chunks: Sequence[Chunk], row_caches: RowCaches, read_drafts: ReadDrafts) -> PrefilledRows:
        """Launch one forward that reads a chunk of each of several prompts.

        `read_drafts` reads them into a draft model's cache, if there is one. Returns the prompts that it completes.
        """
        device = self._target.device
        sequences = [sequence for sequence, _ in chunks]
        images = self._prepare_images(sequences[0])
        starts = [sequence.prefilled for sequence in sequences]
        ends = [sequence.prefilled + count for sequence, count in chunks]
        rope = [rope_length(self._target, sequence) for sequence in sequences]
        # Completed prompts need all tokens. Others need only the chunk's and the one before it, from which a draft
        # model with recurrent states continues.
        complete = [end == sequence.prefill_length for sequence, end in zip(sequences, ends, strict=True)]
        first = [0 if whole else max(start - 1, 0) for whole, start in zip(complete, starts, strict=True)]
        tokens = to_device(stack_tokens([sequence.tokens for sequence in sequences], ends, first), device)
        caches = row_caches.of_prompts(sequences)
        inputs = {ROPE_BY_LENGTH: to_device(rope, device)}
        if any(slots := [sequence.inputs[ADAPTERS] for sequence in sequences]):
            inputs[ADAPTERS] = to_device(slots, device, torch.long)
        prompts = Prompts(tokens, starts, ends, cache=caches.target, inputs=inputs)

        def show(row: int, first: int, logits: Tensor) -> None:
            sequence = sequences[row]
            count = sequence.request.params.prompt_logprobs
            assert count is not None
            following = list(sequence.request.prompt[first + 1 : first + 1 + len(logits)])
            sequence.prompt_scores.extend(score_prompt(logits, following, count))

        # Before the target, which needs its result last: both are only launched here.
        read_drafts(sequences, prompts, caches.draft)
        if images is not None:  # a prompt with images is read whole, by the model's own forward
            text = tokens[:, : ends[0]]
            logits, hidden = self._target.images.read_prompt(text, images, caches.target, inputs.get(ADAPTERS))
        else:
            logits, hidden = self._target.prefill(prompts, show=show if sequences[0].needs_scores else None)
        # Counted at the launch: later forwards run after this one on the device.
        done = _take_note(chunks)
        return PrefilledRows(sequences, tokens, prompts.upto, logits, hidden, caches, range(len(sequences))).at(done)

    def _prepare_images(self, sequence: TokenSequence) -> ImagePrompt | None:
        """Return the model's inputs for the images of a prompt, which set the positions of its tokens; None for none.

        Raises:
            ArgumentError: The images do not fit the prompt.
            UnsupportedError: The sequence's adapter changes how images are read.
        """
        if sequence.request.images is None:
            return None
        if sequence.request.adapter is not None:
            sequence.request.adapter.check_images()
        prompt = sequence.request.images.prepare(self._target.model, sequence.request.prompt)
        sequence.position_shift = prompt.position_shift
        return prompt

    @property
    def can_mix(self) -> bool:
        """Return whether steps can also read prompts: not whole ones, nor in a draft model's other tokens."""
        models = [model for model in (self._target, self._draft_model) if model is not None]
        # Recurrent layers read prompts row by row, in a separate forward.
        may_mix = all(RECURRENT_STATES not in model.features and model.paged.ok for model in models)
        return may_mix and self._same_ids and self._limits.chunked

    def fit_steps(self, sequences: Sequence[TokenSequence], rows: int, step_nodes: Collection[int]) -> bool:
        """Return whether steps read the rest of these prompts as fast as forwards of their own would.

        They do where one step reads all of it, and, with a pace, where the prompts are short. Arguments are as for
        `choose_mixed`.
        """
        left = _left(sequences)
        if self._limits.paced and left <= SHORT_PROMPT * len(sequences):
            return True
        room = rooms_of(rows, step_nodes, bulk=self._limits.bulk, left=left)[-1]
        return len(sequences) <= room and left <= min(room * TOKENS_PER_CHUNK, self._limits.max_num_tokens)

    def choose_mixed(self, sequences: Sequence[TokenSequence], rows: int, step_nodes: Collection[int]) -> PromptStep:
        """Choose the prompt chunks that one step reads together with the rows' trees.

        In a bulk call, prompts of many rows that were admitted together end in the same step, since about 100 kernels
        draw the first tokens of sequences and add their rows, however many there are.

        Args:
            sequences: Sequences whose prompts steps read, in the order of their admission.
            rows: Rows that decode.
            step_nodes: Nodes of all their trees, with drafts and without.
        """
        if not sequences:
            return NO_PROMPTS
        rooms = rooms_of(rows, step_nodes, bulk=self._limits.bulk, left=_left(sequences))
        together = self._limits.bulk and rows >= BULK_ROWS
        if together:
            first = sequences[0].admission.round
            sequences = [each for each in sequences if each.admission.round == first][:MAX_GROUP]
        # However many tokens the trees have, some of a prompt are read, or it would wait for rows to end.
        most = max(self._limits.max_num_tokens - max(step_nodes), BLOCK_SIZE)
        chunks_left = -(-min(_left(sequences), most) // TOKENS_PER_CHUNK)
        room = next((room for room in rooms if max(len(sequences), chunks_left) <= room), rooms[-1])
        budget = min(room * TOKENS_PER_CHUNK, most)
        if together:
            chunks = chunks_that_end_together(sequences, budget)
        else:
            [chunks] = choose_chunks(sequences, budget, padded=False, chunked=True)
        # The number of chunks is bounded too: each has a row of the buffers.
        return PromptStep(chunks[:room], room)

    def finish_mixed(self, chunks: Sequence[Chunk], ends: ChunkEnds, row_caches: RowCaches) -> PrefilledRows | None:
        """Record chunks that a step has read, and return the prompts that are complete; None if there are none."""
        device, done = self._target.device, _take_note(chunks)
        if not done:
            return None
        sequences = [chunks[row][0] for row in done]
        lengths = [sequence.prefilled for sequence in sequences]
        tokens = to_device(stack_tokens([sequence.tokens for sequence in sequences], lengths), device)
        upto, index = to_device(lengths, device, torch.long), to_device(done, device, torch.long)
        logits, hidden = ends.logits.index_select(0, index), ends.hidden.index_select(0, index)
        caches = row_caches.of_prompts(sequences)
        return PrefilledRows(sequences, tokens, upto, logits, hidden, caches, range(len(sequences)))


def _left(sequences: Sequence[TokenSequence]) -> int:
    """Return how many tokens of their prompts are not read yet."""
    return sum(sequence.prefill_length - sequence.prefilled for sequence in sequences)


def _take_note(chunks: Sequence[Chunk]) -> list[int]:
    """Add chunks to the counts of read tokens, and return the indices of chunks that complete their prompts."""
    for sequence, count in chunks:
        sequence.prefilled += count
    return [row for row, (sequence, _) in enumerate(chunks) if sequence.prefilled == sequence.prefill_length]
