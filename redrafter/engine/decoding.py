"""One request, from prefill to its last token."""

import time
import warnings

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from redrafter.engine.batch import Batch
from redrafter.engine.outputs import GenerateOutput, GenerateStats, Stats
from redrafter.engine.request import Request
from redrafter.engine.stopping import cut, first_stop
from redrafter.engine.streaming import StepStreamer
from redrafter.step import StepOutput

__all__ = ["decode"]


class _Row:
    """What the host knows of one row: its text so far, and what is recorded of each token."""

    def __init__(self, prompt: list[int], max_new_tokens: int, depth: int):
        self.prompt, self.max_new_tokens = prompt, max_new_tokens  # the prompt as it came, padding included
        self.text: list[int] = []
        self.ended = False
        self.stats = Stats(accepted_by_depth=[0] * depth)
        self.scores: list[Tensor] = []  # `[count, V]` per step
        self.logits: list[Tensor] = []

    def append(self, new: list[int], request: Request) -> list[int]:
        """Append `new` up to where the row stops, and return what was appended."""
        new, self.ended = cut(new, self.max_new_tokens - len(self.text), request.eos)
        for criterion in request.criteria:
            stop = first_stop(criterion, self.prompt + self.text, new, request.pad_token)
            if stop is not None:
                new, self.ended = new[: stop + 1], True
        self.text += new
        return new


def decode(batch: Batch, request: Request, input_ids: Tensor, stream: StepStreamer | None) -> Tensor | GenerateOutput:
    """Decode a request: read the prompts, then step until every row has ended.

    Args:
        batch: The request's rows, which are closed at the end.
        request: What is to be written.
        input_ids: Prompts as the caller gave them, `[B, P]`; new tokens follow behind them.
        stream: Takes each row's tokens as they are made, or None.

    Returns:
        Ids `[B, P + new]`, or a `GenerateOutput` where the request asks for one.
    """
    _warn_slow(request)
    lengths = request.lengths
    longest_new = [limit - length for limit, length in zip(request.limits, lengths, strict=True)]
    rows = [_Row(*pair, batch.depth) for pair in zip(input_ids.tolist(), longest_new, strict=True)]
    try:
        _record(rows, batch, *batch.prefill(), request, stream, counted=False)
        while not all(row.ended for row in rows) and time.time() < request.deadline:
            longest = max(lengths) + max(len(row.text) for row in rows) - 1
            _record(rows, batch, *batch.step(longest), request, stream)
    finally:
        batch.close([row.text for row in rows])
    if stream is not None:
        stream.end()
    _warn_cut_short(rows, request)
    return _output(rows, input_ids, request)


def _record(
    rows: list[_Row],
    batch: Batch,
    output: StepOutput,
    report: list[list[int]],
    request: Request,
    stream: StepStreamer | None,
    *,
    counted: bool = True,
) -> None:
    """Record what a step drew; rows that have ended stand still from then on.

    Args:
        rows: What is recorded of each row.
        batch: The rows on the device.
        output: What the step drew.
        report: For each row its tokens and, last, the accepted length.
        request: What is to be recorded.
        stream: Takes each row's tokens, or None.
        counted: False for the prefill, which is no step.
    """
    ended = False
    for index, (row, line) in enumerate(zip(rows, report, strict=True)):
        if row.ended:
            continue
        *tokens, accepted = line
        new = row.append(tokens[: accepted + 1], request)
        ended |= row.ended
        drafts = min(accepted, len(new))
        if counted:
            row.stats.count(output.drafted, drafts, len(new))
        if request.want_scores or request.want_logits:
            nodes = output.path.nodes[index, : len(new)]
            if request.want_scores:
                row.scores.append(output.scores[index, nodes].float())
            if request.want_logits:
                row.logits.append(output.logits[index, nodes].float())
        if stream is not None:
            stream.put_step(index, new, drafts, row.ended)
    if ended:
        batch.keep([not row.ended for row in rows])


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
    """Regroup scores or logits by position of the new text, as transformers' `generate` returns them.

    Args:
        rows: For each of B rows, the tensors `[count, V]` of its steps, where `count` is the number of tokens that the
            step added to the row.

    Returns:
        One tensor `[B, V]` for each new token of the longest row. Rows that ended before it have zeros there.
    """
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


def _warn_cut_short(rows: list[_Row], request: Request) -> None:
    """Warn of texts that ended because the target's context did."""
    cut_short = [
        index
        for index, row in enumerate(rows)
        if request.cut_short[index] and len(row.text) == row.max_new_tokens and row.text[-1] not in request.eos
    ]
    if cut_short:
        which = "the text" if len(rows) == 1 else f"{len(cut_short)} of {len(rows)} texts"
        warnings.warn(
            f"{which} ended at the target's context of {request.limits[cut_short[0]]} tokens, "
            "before the length that was asked for; ask for fewer new tokens, or shorten the prompt",
            stacklevel=2,
        )
