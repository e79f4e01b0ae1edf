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
from redrafter.step import Drawn, Proposer, prefill, step
from redrafter.stopping import cut, first_stop
from redrafter.streaming import StepStreamer
from redrafter.target import Target

__all__ = ["decode"]


class _Row:
    """What the host knows of one row: its text so far, and what it was asked to record of each token."""

    def __init__(self, prompt: list[int], depth: int):
        self.prompt = prompt  # as it came, padding included
        self.text: list[int] = []
        self.ended = False
        self.stats = Stats(accepted_by_depth=[0] * depth)
        self.scores: list[Tensor] = []  # `[count, V]` per step
        self.logits: list[Tensor] = []


def decode(
    target: Target, proposer: Proposer, request: Request, input_ids: Tensor, stream: StepStreamer | None
) -> Tensor | GenerateOutput:
    """The loop around `step`. input_ids: `[B, P]` as the caller gave them; the result is laid out on from there."""
    _warn_slow(request)
    rows = [_Row(prompt, proposer.depth) for prompt in input_ids.tolist()]
    longest = int(request.length.max())
    # A row's last step may overshoot its limit by K; standing still, it is then drafted for K further.
    room = int(request.limit.max()) + 2 * proposer.depth + 1
    cache = target.new_cache(len(rows))
    cache.reserve(longest)
    tokens = pad(request.prompts[:, :longest], (0, room - longest))
    state, drawn = prefill(tokens, request.length, longest, target, cache, request.sampler)
    state = state.keep(_take(rows, drawn, request.length - 1, request, stream, drafted=None))
    while not all(row.ended for row in rows) and time.time() < request.deadline:
        written = longest + max(len(row.text) for row in rows)
        cache.reserve(written + proposer.depth + proposer.nodes)  # that overshoot
        before = state.length
        state, drawn = step(state, proposer, target, cache, request.sampler)
        state = state.keep(_take(rows, drawn, before, request, stream, drafted=proposer.nodes - 1))
    if stream is not None:
        stream.end()
    return _output(rows, input_ids, request)


def _take(
    rows: list[_Row],
    drawn: Drawn,
    before: Tensor,
    request: Request,
    stream: StepStreamer | None,
    *,
    drafted: int | None,
) -> Tensor:
    """Write down what a step drew, each row up to where it stops. Returns `[B]` bool, the rows that go on.

    before: `[B]`, committed tokens before the step. drafted: drafts verified per row; None for the prefill, which is no
    step. The only place that reads from the device, once.
    """
    accepted = drawn.path.accepted
    count, done = cut(drawn.tokens, accepted, before, request.limit, request.eos)
    read = torch.cat([drawn.tokens, count[:, None], accepted[:, None], done[:, None]], dim=1).tolist()
    for index, (row, (*tokens, kept, drafts, last)) in enumerate(zip(rows, read, strict=True)):
        if row.ended:
            continue
        new, row.ended = tokens[:kept], bool(last)
        for criterion in request.criteria:
            stop = first_stop(criterion, row.prompt + row.text, new, request.pad_token)
            if stop is not None:
                new, row.ended = new[: stop + 1], True
        row.text += new
        drafts = min(drafts, len(new))
        if drafted is not None:
            row.stats.count(drafted, drafts, len(new))
        nodes = drawn.path.nodes[index, : len(new)]
        if request.want_scores:
            row.scores.append(drawn.scores[index, nodes])
        if request.want_logits:
            row.logits.append(drawn.logits[index, nodes].float())
        if stream is not None:
            stream.put_step(index, new, drafts, row.ended)
    return torch.tensor([not row.ended for row in rows], device=before.device)


def _output(rows: list[_Row], input_ids: Tensor, request: Request) -> Tensor | GenerateOutput:
    width = max(len(row.text) for row in rows)
    new = torch.tensor([row.text + [request.pad_token] * (width - len(row.text)) for row in rows])
    sequences = torch.cat([input_ids, new.to(input_ids)], dim=1)
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
