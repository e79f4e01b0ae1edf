"""Recycled tokens: drafts for any model without training, read from a table of tokens that the target found likely.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(arXiv 2408.08696): each verification computes the target's logits at all nodes of a tree, and decoding uses one token
of each. Here a table stores the C likeliest next tokens, by the last two tokens and by the last one, and a beam search
drafts from it. At a temperature, the search adds the noise that the target will draw with to the stored logits, so that
a draft is the likely draw instead of the likely token.
"""

from dataclasses import dataclass
from math import inf, log
from threading import Lock

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import Likelihoods, SearchProposer, State
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.features import OWN_DRAFTS
from redrafter.model.forward_batch import LogitsReader
from redrafter.model.target import Target
from redrafter.sampling.noise import GAMMA
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Candidates, Expand, top_continuations
from redrafter.tree.token_tree import Tree

# Simulated with SmolLM2 for 20 chats of MT-Bench: the mean of greedy texts (0.62 for the likeliest) and of T=1 (0.35).
LIKELIHOODS = Likelihoods((
    (0.48, 0.23), (0.28, 0.18), (0.21, 0.29), (0.12, 0.48), (0.06, 0.72), (0.03, 1.5), (0.015, inf),
))  # fmt: skip
# T=1 alone: with these, 18 trees of 2 to 26 nodes are expected to give the simulated tokens per step within 1 %.
SAMPLED = Likelihoods((
    (0.51, 0.085), (0.387, 0.041), (0.262, 0.027), (0.126, 0.137), (0.076, 0.272), (0.047, 1.5), (0.022, 1.9),
    (0.002, inf),
), deeper=0.2)  # fmt: skip
# Log-likelihood of a draft, by the stored logits, below which a CPU does not verify it, as each node costs arithmetic.
# Simulated: 1.47 tokens per step with 3.6 nodes, and 1.61 with 8.4 without a limit.
LEAST_SCORE = log(0.15)
# Log-probabilities are multiplied by this when stored: a likely token is less likely after other words. Simulated, 26
# nodes: 1.70 tokens per step with 1, 1.72 with 0.3 to 0.5.
SHARPNESS = 0.5
TEXT_LOGIT = SHARPNESS * log(0.5)  # of a token that follows in a prompt, which says nothing of others
UNKNOWN = -30.0  # logit of a token of which nothing is known
MOST_READ = 4096  # last tokens of a prompt that are stored
TOKEN_BITS = 24  # of a key, for its last token
_LOCK = Lock()  # so that no thread reads an entry of which another one has written a part

Table = tuple[Tensor, Tensor, Tensor]
"""Keys `[H]`, tokens `[H, C]` and logits `[H, C]` of H entries, a power of two."""


class RecycledConfig(AnyDrafterConfig):
    """The size of a table of recycled tokens, with the fields of `AnyDrafterConfig`.

    Attributes:
        candidates: C, tokens of an entry.
        entries: H, entries of the table, a power of two.
    """

    model_type = "redrafter_recycled"

    draft_beams: int = 5
    draft_len_per_beam: int = 5
    trained_draft_len: int | None = 3  # levels on a CPU, where the noise of each further one takes time
    candidates: int = 16
    entries: int = 1 << 17

    def check(self) -> None:
        """Raise `ArgumentError` for values that no table can have."""
        super().check()
        self.require("entries", self.entries & (self.entries - 1) == 0, "be a power of two")
        self.require("candidates", self.candidates <= self.vocab_size, f"be at most vocab_size={self.vocab_size}")


def place_of(key: Tensor, entries: int) -> Tensor:
    """Return the entry that may hold a key, both int64 of any shape."""
    return ((key ^ (key >> TOKEN_BITS)) * GAMMA >> 40) & (entries - 1)


def keys_of(sharing: Tensor, before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of two tokens and of the last one alone, int64 of the arguments' shape."""
    single = sharing + tokens
    return single + (before + 1 << TOKEN_BITS), single


def read_entries(table: Table, sharing: Tensor, before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that are likely to follow two tokens, then those that are likely to follow the last of them.

    Args:
        table: The table.
        sharing: Number of the texts that share drafts with each row, `[B, 1]` int64.
        before: The token before the last one, `[B, w]` int64.
        tokens: The last token, `[B, w]` int64.

    Returns:
        Tokens and float32 logits, `[B, w, 2C]` each. The first C tokens are different; another one's logit is -inf if
        it is among them.
    """
    keys, ids, logits = table
    wanted = torch.stack(keys_of(sharing, before, tokens), dim=2)  # [B, w, 2]
    place = place_of(wanted, len(keys))
    known = keys[place] == wanted
    # The tokens of another key are not shown, as its text may be another client's.
    found = ids[place].where(known[..., None], torch.arange(ids.shape[1], device=ids.device))  # [B, w, 2, C]
    values = logits[place].float().masked_fill(~known[..., None], UNKNOWN)
    same = found[:, :, 0, :, None] == found[:, :, 1, None]  # [B, w, C, C]
    first, second = values.unbind(2)
    # A token that both have keeps the larger logit: where one entry is unknown, the other one's.
    first = torch.maximum(first, second[:, :, None].masked_fill(~same, -torch.inf).amax(3))
    return found.flatten(2), torch.cat([first, second.masked_fill(same.any(2), -torch.inf)], dim=2)


def write_entries(table: Table, key: Tensor, ids: Tensor, logits: Tensor, written: Tensor) -> None:
    """Write entries, of which one of those with the same place is kept.

    Args:
        table: The table.
        key: Their keys, `[M]` int64.
        ids: Different tokens of each, `[T, C]` int64; M is a multiple of T, and key m has those of m modulo T.
        logits: Their logits, `[T, C]`.
        written: Which keys are written, `[M]` bool.
    """
    number = torch.arange(len(key), device=key.device)[written]
    place, order = place_of(key[number], len(table[0])).sort(stable=True)
    # The last of each place: parts of several would make an entry with a token twice, and siblings must differ.
    wins = place.diff(append=place.new_full((1,), -1)) != 0
    place, number = place[wins], number[order[wins]]
    source = number % len(ids)
    for stored, new in zip(table, (key[number], ids[source], logits[source]), strict=True):
        stored[place] = new.to(stored.dtype)


@register_drafter()
class RecycledTokens(DrafterModel):
    """A table of the tokens that the target found likely, which each step reads and writes.

    A key is a text's last token or its last two, with the number of the texts that share drafts. It has one place in
    the table, and replaces another key there.

    Attributes:
        keys: The key of each entry, -1 for none, `[H]` int64.
        ids: Its tokens, different ones, `[H, C]` int64.
        logits: Their log-probabilities, times `SHARPNESS`, `[H, C]`.
    """

    config_class = RecycledConfig
    config: RecycledConfig
    made_from_config = False
    keys: Tensor
    ids: Tensor
    logits: Tensor

    def __init__(self, config: RecycledConfig):
        """Make an empty table."""
        super().__init__(config)
        self.register_buffer("keys", torch.full((config.entries,), -1))
        self.register_buffer("ids", torch.arange(config.candidates).repeat(config.entries, 1))
        self.register_buffer("logits", torch.full((config.entries, config.candidates), UNKNOWN))
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits, as there are no parameters."""
        return self.logits.dtype

    def check_entries(self) -> None:
        """Raise `CheckpointError` unless the tokens of each entry are different ids of the base."""
        ids = self.ids.sort(dim=-1).values
        if ids[:, 0].min() < 0 or ids[:, -1].max() >= self.config.vocab_size or (ids[:, 1:] == ids[:, :-1]).any():
            raise CheckpointError(f"{self.name_or_path} has entries that are not different ids of its base")

    def prepare(self, target: Target) -> None:
        """Prepare nothing: the table is read as it is."""

    @property
    def logits_reader(self) -> LogitsReader:
        """The table itself."""
        return self

    def forget_texts(self) -> None:
        """Forget all entries."""
        with _LOCK:
            self.keys.fill_(-1)

    @property
    def table(self) -> Table:
        """The table."""
        return self.keys, self.ids, self.logits

    def read_tokens(self, sharing: Tensor, before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return likely next tokens and their logits, with the arguments and results of `read_entries`."""
        if kernels.TRITON and tokens.is_cuda:
            return kernels.recycled.read_entries(
                self.table, sharing, before, tokens, unknown=UNKNOWN, token_bits=TOKEN_BITS
            )
        with _LOCK:
            return read_entries(self.table, sharing, before, tokens)

    def write(self, key: Tensor, ids: Tensor, logits: Tensor, written: Tensor) -> None:
        """Write entries, with the arguments of `write_entries`."""
        if kernels.TRITON and key.is_cuda:
            kernels.recycled.write_entries(self.table, key, ids, logits, written)
            return
        with _LOCK:
            write_entries(self.table, key, ids, logits, written)

    def read_step(self, rows: State, tree: Tree, logits: Tensor) -> None:
        """Store the likeliest tokens that follow each verified node; see `LogitsReader`."""
        before = tree.tokens.gather(1, tree.parents)
        before[:, :1] = _before_pending(rows)
        written = rows.active[:, None].expand_as(before)
        if tree.counts is not None:
            written = written & (torch.arange(before.shape[1], device=before.device) < tree.counts[:, None])
        of_nodes = [_sharing(rows).expand_as(before), before, tree.tokens, written]
        if logits.shape[:2] != before.shape:
            of_nodes = [x.flatten()[tree.verified_nodes] for x in of_nodes]
        *words, written = (x.flatten() for x in of_nodes)  # [T] each
        nodes, count = logits.flatten(0, 1), self.config.candidates
        if logits.is_cuda:
            none = torch.zeros(len(nodes), 1, device=logits.device)
            values, _, ids = top_continuations(nodes[:, None], none, count, None)  # [T, C]
        else:  # without a pass that sums over the vocabulary
            best = nodes.topk(count, dim=-1)
            values, ids = best.values.log_softmax(dim=-1, dtype=torch.float32), best.indices
        values = (SHARPNESS * values).nan_to_num(nan=UNKNOWN).clamp(min=UNKNOWN)  # a token may be ruled out
        self.write(torch.cat(keys_of(*words)), ids, values, written.repeat(2))

    def read_prompts(self, rows: State, width: int) -> None:
        """Store the token that follows each token of a text, in place of the least likely one; see `LogitsReader`."""
        first = (rows.length + 1 - MOST_READ).clamp(min=0)[:, None]
        place = first + torch.arange(min(width + 1, MOST_READ), device=first.device)
        tokens = rows.tokens.gather(1, place.clamp(max=rows.tokens.shape[1] - 1))
        before = torch.cat([tokens[:, :1], tokens[:, :-2]], dim=1)
        written = place[:, 1:] <= rows.length[:, None]
        words = (x.flatten() for x in (_sharing(rows).expand_as(before), before, tokens[:, :-1]))
        following, key = tokens[:, 1:].flatten().repeat(2)[:, None], torch.cat(keys_of(*words))  # [2T, 1], [2T]
        place = place_of(key, len(self.keys))
        with _LOCK:
            known = (self.keys[place] == key)[:, None]
            ids, logits = self.ids[place], self.logits[place].masked_fill(~known, UNKNOWN)
        ids = ids.where(known, torch.arange(ids.shape[1], device=ids.device))
        # The token itself if the entry has it already.
        position = logits.masked_fill(ids == following, -torch.inf).argmin(dim=1, keepdim=True)
        ids, logits = ids.scatter(1, position, following), logits.scatter(1, position, TEXT_LOGIT)
        self.write(key, ids, logits, written.flatten().repeat(2))


def _sharing(rows: State) -> Tensor:
    """Return the number of the texts that share drafts with each row, `[B, 1]` int64."""
    number = rows.inputs.get(OWN_DRAFTS)
    return torch.zeros_like(rows.length)[:, None] if number is None else number[:, None]


def _before_pending(rows: State) -> Tensor:
    """Return the last committed token of each row, `[B, 1]` int64."""
    return rows.tokens.gather(1, (rows.length - 1).clamp(min=0)[:, None])


@dataclass(frozen=True)  # for `__post_init__`, which the class above does not have
class RecycledProposer(SearchProposer[None]):
    """Drafts by a search of the tokens that a table stores."""

    drafter: RecycledTokens
    likelihoods, sampled_likelihoods, gains_unevenly = LIKELIHOODS, SAMPLED, True

    def __post_init__(self) -> None:
        if self.target.device.type == "cpu":
            object.__setattr__(self, "least_score", LEAST_SCORE)
            object.__setattr__(self, "sampled_likelihoods", None)  # of trees from which no draft is left out
        if self.beams > (most := self.drafter.config.candidates):
            raise ArgumentError(f"num_beams={self.beams} is more than the {most} tokens of an entry of the table")

    def read_context(self, state: State, cache: KVCache) -> None:
        """Return None: the table stores all that is read."""

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: None) -> Expand:
        """Return the function that reads the next tokens of every beam; see `SearchProposer.scores`."""
        sharing = _sharing(state)
        above = _before_pending(state)  # [B, w'], tokens of the level above

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Candidates:
            nonlocal above
            ids, logits = self.drafter.read_tokens(sharing, above.gather(1, sources), tokens)
            above = tokens
            return Candidates(sampler.draft_scores(logits, noise, k, ids), ids)

        return expand


RecycledTokens.proposer_class = RecycledProposer
