"""One requested sequence of tokens, how it is drawn, and the tokens that each round adds to it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise, zip_longest
from typing import Literal

from torch import Tensor

from redrafter.cache.block_manager import BlockTable
from redrafter.drafting.prompt_lookup import Repeats
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.errors import ArgumentError, NotFiniteError
from redrafter.features import ADAPTERS, IMAGES, OWN_DRAFTS, Feature
from redrafter.grammar.grammar import GuidedText
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.request import GenerationRequest


@dataclass
class Stats:
    """Statistics of speculation. A step is one forward of the target over a tree; prefill is not one.

    Attributes:
        steps: Steps taken, those without drafts included.
        drafted: Drafts verified.
        accepted: Drafts that became output.
        copied: Number of these that were copied from the sequence and that no drafter proposed.
        copies: Number of verified drafts that were copied from the sequence.
        emitted: Tokens that steps added to the output.
        accepted_by_depth: Entry d counts the steps in which at least d + 1 drafts became output.
        per_step: Drafts verified and drafts that became output, of each step that had drafts, in their order.
        undrafted_steps: Steps for which nothing was drafted, because drafting was off or had paused. A step in which
            the rows share the nodes that are verified, and none was left for this one, does not count.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    copies: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    undrafted_steps: int = 0
    per_step: list[tuple[int, int]] = field(default_factory=list, repr=False, compare=False)

    @property
    def draft_steps(self) -> int:
        """Steps for which there were drafts, whether any of them was verified or not."""
        return self.steps - self.undrafted_steps

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step added to the output; 0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def accepted_length(self) -> float | None:
        """Mean number of tokens of a step with drafts: one, and the accepted drafts; None without such a step."""
        return 1 + self.accepted / self.draft_steps if self.draft_steps else None

    @property
    def acceptance(self) -> list[float | None]:
        """Acceptance by depth: entry d is the share of the steps with d accepted drafts or more that accepted one more.

        Steps without drafts do not count; None where no step accepted d.
        """
        reached = [self.draft_steps, *self.accepted_by_depth]
        return [after / before if before else None for before, after in pairwise(reached)]

    @classmethod
    def total(cls, rows: Sequence["Stats"]) -> "Stats":
        """Return the sums of the counts of rows, whose drafts need not be of one length; steps are row after row."""
        depths = map(sum, zip_longest(*(row.accepted_by_depth for row in rows), fillvalue=0))
        counts = [each.name for each in fields(Stats) if each.default == 0]
        return Stats(
            **{name: sum(getattr(row, name) for row in rows) for name in counts},
            accepted_by_depth=[*depths],
            per_step=[step for row in rows for step in row.per_step],
        )

    def count(self, drafted: int | None, accepted: int, emitted: int, copied: int = 0, copies: int = 0) -> None:
        """Add a step: drafts verified, None where nothing was drafted, and output tokens, after a stop has cut them."""
        self.steps += 1
        self.emitted += emitted
        if drafted is None:
            self.undrafted_steps += 1
            return
        self.per_step.append((drafted, accepted))
        self.drafted += drafted
        self.accepted += accepted
        self.copied += copied
        self.copies += copies
        # Counted by depth, which gives the acceptance of each level.
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1


Finish = Literal["stop", "length", "cancelled", "error"]
Account = tuple[int, str]  # a priority and a client, whose sequences' tokens are counted together


@dataclass(slots=True)  # not frozen, which takes 1 us more for each row of each step
class SequenceDelta:
    """The tokens that a forward drew for a sequence, which `TokenSequence.append` cuts to those appended to it.

    Nobody changes it after that.

    Attributes:
        tokens: New tokens: accepted drafts and then the token that was drawn after them.
        accepted: Number of leading tokens that were drafts.
        logprobs: Log-probabilities of each token, and of the likeliest tokens by id; None unless requested.
        finish: Why the sequence ends here, or None if it continues.
        error: The exception, if `finish` is "error".
        drafted: Drafts that were verified, 0 where the other rows of the step left none; None for a first token and in
            an undrafted step.
        copied: Number of accepted drafts, the last ones, that only copies had drafted.
        copies: Number of verified drafts that were copied from the text.
        logits: The target's logits that the tokens were drawn from, `[count, V]`; None unless requested.
        scores: These logits after the sampler's processors, `[count, V]` float32; None unless requested.
        overflowed: In a draw, whether the logits after these tokens, if any, are not finite.
    """

    tokens: Sequence[int]
    accepted: int = 0
    logprobs: Sequence[tuple[float, Mapping[int, float]]] | None = None
    finish: Finish | None = None
    error: BaseException | None = None
    drafted: int | None = None
    copied: int = 0
    copies: int = 0
    logits: Tensor | None = None
    scores: Tensor | None = None
    overflowed: bool = False


@dataclass(eq=False)
class DraftSequence:
    """The tokens of a sequence in a draft model's vocabulary, and how far they are in that model's cache.

    Attributes:
        text: Its tokens as the draft model reads them.
        block_table: Blocks of the draft model's cache, while the sequence holds a slot.
        prefilled: Leading tokens of `text` whose keys and values are in these blocks, while the prompt is being read.
    """

    text: DraftText
    block_table: BlockTable | None = None
    prefilled: int = 0


@dataclass(eq=False)
class Admission:
    """When a sequence arrived, and when the scheduler gave it a slot.

    Attributes:
        arrival: Number of its arrival, from 1; 0 before it is submitted.
        arrived_at: When it was made, by `time.perf_counter`.
        queued: Seconds for which it waited for its first slot; None while it does.
        round: Round in which it was last given a slot; None if it never was.
    """

    arrival: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    queued: float | None = None
    round: int | None = None


@dataclass(eq=False)  # a sequence equals only itself: comparing fields would look through whole prompts
class TokenSequence:
    """A request while it is served: its prompt, the tokens that follow it, and its state of decoding.

    Attributes:
        request: The request that it continues.
        sink: Called with every delta, in the thread of the engine.
        find_stop: Called with the tokens of a step; returns the index of the one that ends the sequence, or None.
        quiet: Whether `sink` needs its first and its last delta only, and nothing but an end token or a limit ends it.
        position_shift: Offset from the index of its tokens to their positions, once its images
            were read.
        tokens: The prompt and the tokens that follow it so far.
        block_table: Blocks of the cache, while the sequence holds a slot.
        prefilled: Leading tokens whose keys and values are in these blocks, while its prompt is being read.
        reused: How many of them were in the cache already when the sequence was admitted, at most.
        draft: Its tokens for a draft model with another vocabulary; None without such a model.
        unread_from: Number of leading tokens that a draft model has read, where it has not read the others yet; None
            where it follows the sequence.
        admission: When it arrived, and when it was given a slot.
        row: Its row of the running batch; None while it has none.
        repeats: Reports whether its last tokens occur earlier in it, so that drafts may be copied.
        unread_copies: Last tokens that its last step copied, which a draft model has not read yet.
        launched: Forwards that were launched and draw tokens of it which the host has not read.
        cancelled: Whether it shall end before its next step.
        ended: Whether its last delta was reported.
        stats: Counts of its steps; the draw of its first token is none.
        prompt_scores: Scores of the prompt's tokens but the first, as far as it is read, if they were asked for.
        guide: State of its grammar; None without a grammar.
    """

    request: GenerationRequest
    sink: Callable[["TokenSequence", SequenceDelta], object]
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    quiet: bool = False
    position_shift: int = 0
    tokens: list[int] = field(default_factory=list)
    block_table: BlockTable | None = None
    prefilled: int = 0
    reused: int = 0
    draft: DraftSequence | None = None
    unread_from: int | None = None
    admission: Admission = field(default_factory=Admission)
    row: int | None = None
    repeats: Repeats = field(default_factory=Repeats)
    unread_copies: int = 0
    launched: int = 0
    cancelled: bool = False
    ended: bool = False
    stats: Stats = field(default_factory=Stats)
    prompt_scores: list[PromptScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, params = list(self.request.prompt), self.request.params
        self.guide = None if params.grammar is None else GuidedText(params.grammar, params.stop_token_ids)

    @property
    def block_tables(self) -> list[BlockTable]:
        """The blocks that it holds of the cache, and after them those of a draft model with another vocabulary."""
        tables = self.block_table, None if self.draft is None else self.draft.block_table
        return [table for table in tables if table is not None]

    @property
    def written(self) -> int:
        """Number of tokens that follow the prompt so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def may_end(self) -> bool:
        """Return whether the launched forwards end it, if they draw as many tokens as its steps before, or one each."""
        return self.written + self.launched * max(self.stats.tokens_per_step, 1) >= self.request.max_new_tokens

    @property
    def inputs(self) -> dict[Feature, int]:
        """The numbers that features read in its row of a forward, as entries of `ForwardBatch.inputs`."""
        adapter = self.request.adapter
        slot = 0 if adapter is None else adapter.slot
        return {ADAPTERS: slot, IMAGES: self.position_shift, OWN_DRAFTS: self._sharing}

    @cached_property
    def _sharing(self) -> int:
        """The number of the texts that share recycled drafts with this one, equal on all ranks; 0 for most texts.

        A salt keeps other clients' texts out of the timing of this one, and an adapter writes other tokens.
        """
        request = self.request
        if request.cache_salt is None and request.adapter is None:
            return 0
        named = repr((request.cache_salt, request.adapter and request.adapter.number)).encode()
        return int.from_bytes(blake2b(named, digest_size=8).digest(), "little") >> 2

    @cached_property
    def account(self) -> Account:
        """The priority and the client that its tokens are counted for."""
        return self.request.priority, self.request.client

    @property
    def needs_scores(self) -> bool:
        """Return whether log-probabilities of the prompt were requested and some are still missing."""
        asked = self.request.params.prompt_logprobs is not None
        return asked and len(self.prompt_scores) < len(self.request.prompt) - 1

    @cached_property
    def max_length(self) -> int:
        """Most tokens of the prompt and the new tokens together."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def prefill_length(self) -> int:
        """Tokens that must be in the cache before the sequence can step.

        For a new prompt, all tokens. For a preempted sequence, all but the pending token.
        """
        return len(self.tokens) - (self.written > 0)

    def draft_length(self, count: int) -> int:
        """Return how many tokens of the draft model the first `count` tokens are."""
        return count if self.draft is None else self.draft.text.length(self.tokens, count)

    def draft_bound(self, positions: int) -> int:
        """Return the most draft-model tokens that the sequence can have at this number of positions."""
        return positions if self.draft is None else self.draft.text.bound(self.tokens, positions)

    def append(self, drawn: SequenceDelta) -> SequenceDelta:
        """Append drawn tokens up to where the sequence ends, and return `drawn`, cut in place to those appended."""
        request = self.request  # each line here runs for every row of every step
        stop_token_ids, written = request.params.stop_token_ids, len(self.tokens) - len(request.prompt)
        left = request.max_new_tokens - written
        new, count = drawn.tokens, len(drawn.tokens)
        # An end token or the limit may come in the middle of accepted drafts.
        if count >= left or not stop_token_ids.isdisjoint(new):
            stop = next((index for index, token in enumerate(new[:left]) if token in stop_token_ids), None)
            drawn.finish = "length" if stop is None else "stop"
            new = new[:left] if stop is None else new[: stop + 1]
        # The stop is searched before drafts are counted: drafts past it become no output.
        if new and self.find_stop is not None and (stop := self.find_stop(new)) is not None:
            new, drawn.finish = new[: stop + 1], "stop"
        # The last token is the target's own draw, unless the row overflowed, which leaves accepted drafts alone.
        if drafts := count - (not drawn.overflowed):
            drawn.accepted = min(drafts, len(new))
            # Copied drafts are the last ones, so a stop cuts them first.
            drawn.copied = max(drawn.copied - (drafts - drawn.accepted), 0)
        # The first token is drawn by the prefill, which is no step.
        if written:
            self.stats.count(drawn.drafted, drawn.accepted, len(new), drawn.copied, drawn.copies)
        self.tokens += new
        self.unread_copies = drawn.copied
        if len(new) < count:
            drawn.tokens = new
            if drawn.logprobs is not None:
                drawn.logprobs = drawn.logprobs[: len(new)]
            if drawn.logits is not None:
                drawn.logits = drawn.logits[: len(new)]
            if drawn.scores is not None:
                drawn.scores = drawn.scores[: len(new)]
        if self.guide is not None and self.guide.error is not None:
            drawn.finish, drawn.error = "error", ArgumentError(self.guide.error)
        elif drawn.overflowed and drawn.finish is None:
            drawn.finish, drawn.error = "error", not_finite(len(self.tokens))
        return drawn


def not_finite(count: int) -> NotFiniteError:
    """Return the error of a sequence whose logits are not finite. count: its number of tokens."""
    return NotFiniteError(
        f"the model computes no finite number after {count} tokens (NaN or infinite logits): where the model or its "
        "adapter overflows in float16, load it in bfloat16 or float32 (--dtype)"
    )
