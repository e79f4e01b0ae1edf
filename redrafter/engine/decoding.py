"""The output of a call of `generate`, from its first round to its last."""

import warnings

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from redrafter.engine.call import Outcome, Row, run_call
from redrafter.engine.outputs import GenerateOutput, GenerateStats
from redrafter.engine.request import Request
from redrafter.engine.streaming import StepStreamer
from redrafter.scheduler.scheduler import Scheduler

__all__ = ["decode"]


def decode(
    scheduler: Scheduler, request: Request, input_ids: Tensor, stream: StepStreamer | None, progress: bool = False
) -> Tensor | GenerateOutput:
    """Decode a call.

    Args:
        scheduler: A scheduler without sequences.
        request: What is to be written.
        input_ids: Prompts as the caller gave them, `[B, P]`; new tokens follow behind them.
        stream: Takes each row's tokens as they are made, or None.
        progress: Whether to show a bar of the rows that have ended.

    Returns:
        Ids `[B, P + new]`, or a `GenerateOutput` where the request asks for one.
    """
    _warn_slow(request)
    outcome = Outcome()
    rows = [Row(index, request, prompt, outcome, stream) for index, prompt in enumerate(input_ids.tolist())]
    run_call(scheduler, rows, outcome, request.deadline, progress)
    if stream is not None:
        stream.end()
    _warn_cut_short(rows, request)
    return _output(rows, input_ids, request)


def _output(rows: list[Row], input_ids: Tensor, request: Request) -> Tensor | GenerateOutput:
    width = max(len(row.text) for row in rows)
    new = torch.tensor([row.text + [request.pad_token] * (width - len(row.text)) for row in rows], dtype=torch.long)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not request.as_dict:
        return sequences
    # transformers annotates these fields more narrowly than what it puts there itself.
    return GenerateOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=_columns([row.scores for row in rows]) if request.want_scores else None,  # type: ignore[arg-type]
        logits=_columns([row.logits for row in rows]) if request.want_logits else None,  # type: ignore[arg-type]
        stats=GenerateStats.of([row.sequence.stats for row in rows], request.seeds),
    )


def _columns(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Regroup scores or logits by position of the new text, as transformers' `generate` returns them.

    Args:
        rows: For each of B rows, the tensors `[count, V]` of its steps, where `count` is the number of tokens that the
            step added to the row.

    Returns:
        One tensor `[B, V]` for each new token of the longest row. Rows that ended before it have zeros there.
    """
    first = next((piece for pieces in rows for piece in pieces), None)
    if first is None:
        return ()
    none = first[:0]  # of a row that its deadline has left without any token
    return pad_sequence([torch.cat([none, *pieces]) for pieces in rows], batch_first=True).unbind(dim=1)


def _warn_slow(request: Request) -> None:
    criteria = [type(c).__name__ for c in request.criteria if type(c) is not StopStringCriteria]
    for names, what in ((request.slow_processors, "node of the tree"), (criteria, "token")):
        if names:
            warnings.warn(
                f"{', '.join(names)}: your own code runs in Python once per {what}, which is slow; "
                "built-in generation arguments are vectorised",
                stacklevel=2,
            )


def _warn_cut_short(rows: list[Row], request: Request) -> None:
    """Warn of texts that ended because the target's context did."""
    cut_short = [
        index
        for index, row in enumerate(rows)
        if request.cut_short[index] and len(row.text) == row.sequence.max_new_tokens and row.text[-1] not in request.eos
    ]
    if cut_short:
        which = "the text" if len(rows) == 1 else f"{len(cut_short)} of {len(rows)} texts"
        warnings.warn(
            f"{which} ended at the target's context of {request.limits[cut_short[0]]} tokens "
            "(max_position_embeddings of its config), before the length that was asked for; model.generate may go on, "
            "beyond what the model was made for: ask for fewer new tokens, or shorten the prompt",
            stacklevel=2,
        )
