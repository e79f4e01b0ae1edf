"""One request, from prefill to its last token."""

import time
import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from redrafter.outputs import GenerateOutput, GenerateStats, Stats
from redrafter.request import Request
from redrafter.step import Drawn, Proposer, State, prefill, step
from redrafter.stopping import cut, first_stop
from redrafter.streaming import StepStreamer
from redrafter.target import Target

__all__ = ["decode"]


class _Row:
    """What the host knows of one row: its text so far, and what it was asked to record of each token."""

    def __init__(self, prompt: list[int], room: int, depth: int):
        self.prompt, self.room = prompt, room  # the prompt as it came, padding included; tokens that may follow it
        self.text: list[int] = []
        self.ended = False
        self.stats = Stats(accepted_by_depth=[0] * depth)
        self.scores: list[Tensor] = []  # `[count, V]` per step
        self.logits: list[Tensor] = []

    def take(self, new: list[int], request: Request) -> list[int]:
        """Write on, up to where the row stops. Returns what was written."""
        new, self.ended = cut(new, self.room - len(self.text), request.eos)
        for criterion in request.criteria:
            stop = first_stop(criterion, self.prompt + self.text, new, request.pad_token)
            if stop is not None:
                new, self.ended = new[: stop + 1], True
        self.text += new
        return new


def decode(
    target: Target, proposer: Proposer, request: Request, input_ids: Tensor, stream: StepStreamer | None
) -> Tensor | GenerateOutput:
    """The loop around `step`. input_ids: `[B, P]` as the caller gave them; the result is laid out on from there."""
    _warn_slow(request)
    lengths, limits = request.length.tolist(), request.limit.tolist()
    room = [limit - length for limit, length in zip(limits, lengths, strict=True)]
    rows = [_Row(*pair, proposer.depth) for pair in zip(input_ids.tolist(), room, strict=True)]
    longest = max(lengths)
    # A row's last step may overshoot its limit by K; standing still, it is then drafted for K further.
    width = max(limits) + 2 * proposer.depth + 1
    cache = target.new_cache(len(rows))
    cache.reserve(longest)
    tokens = pad(request.prompts[:, :longest], (0, width - longest))
    state, drawn = prefill(tokens, request.length, longest, target, cache, request.sampler)
    state = _take(rows, state, drawn, request, stream, drafted=None)
    while not all(row.ended for row in rows) and time.time() < request.deadline:
        committed = longest + max(len(row.text) for row in rows) - 1
        if len(rows) == proposer.nodes == 1:
            cache.reserve_one(committed)
        else:
            cache.reserve(committed + proposer.depth + proposer.nodes)  # that overshoot
        state, drawn = step(state, proposer, target, cache, request.sampler)
        state = _take(rows, state, drawn, request, stream, drafted=proposer.nodes - 1)
    if stream is not None:
        stream.end()
    return _output(rows, input_ids, request)


def _take(
    rows: list[_Row], state: State, drawn: Drawn, request: Request, stream: StepStreamer | None, *, drafted: int | None
) -> State:
    """Write down what a step drew. Returns the state in which rows that have ended stand still.

    drafted: drafts verified per row; None for the prefill, which is no step. The only place that reads from the device,
    once.
    """
    ended = [row.ended for row in rows]
    read = torch.cat([drawn.tokens, drawn.path.accepted[:, None]], dim=1).tolist()
    for index, (row, (*tokens, accepted)) in enumerate(zip(rows, read, strict=True)):
        if row.ended:
            continue
        new = row.take(tokens[: accepted + 1], request)
        drafts = min(accepted, len(new))
        if drafted is not None:
            row.stats.count(drafted, drafts, len(new))
        nodes = drawn.path.nodes[index, : len(new)]
        if request.want_scores:
            row.scores.append(drawn.scores[index, nodes])
        if request.want_logits:
            row.logits.append(drawn.logits[index, nodes].float())
        if stream is not None:
            stream.put_step(index, new, drafts, row.ended)
    now = [row.ended for row in rows]
    return state if now == ended else state.keep(torch.tensor(now, device=state.active.device).logical_not_())


def _output(rows: list[_Row], input_ids: Tensor, request: Request) -> Tensor | GenerateOutput:
    width = max(len(row.text) for row in rows)
    new = torch.tensor([row.text + [request.pad_token] * (width - len(row.text)) for row in rows])
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not request.as_dict:
        return sequences
    # transformers annotates these fields more narrowly than what it puts there itself.
    return GenerateOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=_columns([row.scores for row in rows]) if request.want_scores else None,  # type: ignore[arg-type]
        logits=_columns([row.logits for row in rows]) if request.want_logits else None,  # type: ignore[arg-type]
        stats=GenerateStats.of([row.stats for row in rows], request.seeds),
    )


def _columns(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Per row a list of `[count, V]`, to one `[B, V]` per output column, as transformers returns them."""
    return pad_sequence([torch.cat(pieces) for pieces in rows], batch_first=True).unbind(dim=1)


def _warn_slow(request: Request) -> None:
    criteria = [type(c).__name__ for c in request.criteria if type(c) is not StopStringCriteria]
    for names, what in ((request.slow_processors, "node of the tree"), (criteria, "token")):
        if names:
            warnings.warn(
                f"{', '.join(names)}: your own code runs in Python once per {what}, which is slow; "
                "built-in generation arguments are vectorised",
                stacklevel=2,
            )
