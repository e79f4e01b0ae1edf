"""Answer the rows of a data set in batches.

With the same base, tokenizer and seed, the answer to a row does not depend on the batch that it is in.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.app.options import GenerationOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.rows import Row, fingerprint
from redrafter.data.windows import Document
from redrafter.engine.engine import Engine
from redrafter.errors import CacheFullError, ReDrafterError, first_line
from redrafter.measure.run import Run
from redrafter.train.regenerate.config import RegenerateConfig, shard_numbers
from redrafter.train.regenerate.journal import Journal
from redrafter.train.regenerate.tasks import BaseLimits, Task, make_task

__all__ = ["AnswerWriter", "base_name", "choose_batch", "select_rows"]

POOL_BATCHES = 8  # batches of rows that are open at once, among which rows of similar length are looked for
OUT_OF_MEMORY_ERRORS = (CacheFullError, torch.OutOfMemoryError, MemoryError)
LOG_SECONDS = 10.0  # between lines of progress


def select_rows(rows: Iterable[Row], config: RegenerateConfig) -> Iterator[tuple[int, Row, bool]]:
    """Yield the rows of this shard, up to the limit.

    Args:
        rows: All rows of the data set.
        config: Options, among them the shard, the split and the limit.

    Yields:
        The row's number in the data set, the row, and whether it is to be answered: not if it is of another split.
    """
    index, count = shard_numbers(config.shard)
    wanted = 0
    for number, row in enumerate(rows):
        if wanted == config.limit:
            return
        chosen = (row.split or "train") == config.split
        wanted += chosen
        if number % count == index:
            yield number, row, chosen


class AnswerWriter:
    """Takes rows, answers them in batches and adds their records to the journal.

    Args:
        engine: Engine of the base.
        tokenizer: The base's tokenizer.
        config: Options of the run.
        journal: Journal that receives the records.
        log: Prints a line of progress.
        total: Rows that are to be answered, for progress; None if unknown.

    Attributes:
        open: Tasks that have begun and are not done.
        size: Rows in a batch, which is halved when memory is short.
        input: Rows that were taken.
        skipped: Rows that were taken and are of another split.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        config: RegenerateConfig,
        journal: Journal,
        log: Callable[[str], object],
        total: int | None,
    ):
        self.config, self.journal, self.log, self.total = config, journal, log, total
        self.pair = Pair("", "", None, tokenizer, engine)
        self.tokenizer, self.limits, self.base = fingerprint(tokenizer), _limits(self.pair, config), base_name(engine)
        self.open: list[Task] = []
        self.size = config.batch_size
        self.input = self.skipped = 0
        self.started = self.last_log = self.last_batch = time.perf_counter()
        self.done_before, self.tokens_before = len(journal.done), journal.tokens  # by an earlier run

    def answer(self, rows: Iterable[Row]) -> None:
        """Answer all rows of this shard that the journal does not hold yet."""
        coming = select_rows(rows, self.config)
        while True:
            self._open_tasks(coming)
            if not self.open:
                break
            self._answer_batch()
        self._log_progress()

    def _open_tasks(self, coming: Iterator[tuple[int, Row, bool]]) -> None:
        """Open tasks for as many rows as make good batches."""
        while len(self.open) < POOL_BATCHES * self.size and (new := next(coming, None)) is not None:
            number, row, chosen = new
            self.input += 1
            self.skipped += not chosen
            if not chosen or number in self.journal.done:
                continue
            config, tokenizer = self.config, self.pair.tokenizer
            try:
                task = make_task(
                    number, row, tokenizer, self.limits, seed=config.seed, temperatures=config.temperatures
                )
            except ReDrafterError as error:
                self.journal.add([_error(number, row, first_line(error))])
            else:
                self.open.append(task)

    def _answer_batch(self) -> None:
        """Decode one answer for each task of a batch that is chosen from `open`, and add finished tasks to the journal.

        If memory runs out, the batch's tasks stay open and later calls take half as many; a task that was alone in its
        batch is recorded as failed.
        """
        batch, run, reason = choose_batch(self.open, self.size), None, ""
        try:
            run = self.decode(batch)
        except OUT_OF_MEMORY_ERRORS as error:
            reason = first_line(error)
        if run is None:  # outside of the handler nothing holds the batch's tensors any more
            self._halve_batch(batch, reason)
            return
        for task, answer in zip(batch, run.tokens, strict=True):
            task.add_answer(answer, self.limits)
        now = time.perf_counter()
        cost = {"seconds": now - self.last_batch, "steps": run.stats.steps, "emitted": run.stats.emitted}
        self.last_batch = now
        self.settle([self._record(task) for task in batch if task.done] + [{"batch": cost}])
        if now - self.last_log > LOG_SECONDS:
            self._log_progress()

    def decode(self, batch: Sequence[Task]) -> Run:
        """Decode the next answer of each task."""
        arguments: dict[str, Any] = {"eos_token_id": sorted(self.limits.eos)} if self.limits.eos else {}
        options = GenerationOptions(max_new_tokens=self.config.max_new_tokens, temperature=0.0)
        if batch[0].temperature > 0:
            options = GenerationOptions(
                max_new_tokens=self.config.max_new_tokens,
                temperature=1.0,
                top_k=self.config.top_k,
                top_p=self.config.top_p,
            )
            arguments["temperature"] = [task.temperature for task in batch]
            arguments["seed"] = [task.seed for task in batch]
        return self.pair.run([task.ids for task in batch], options, streamer=None, **arguments)

    def _halve_batch(self, batch: Sequence[Task], reason: str) -> None:
        """Halve the batch size; a row that does not fit into memory alone has failed."""
        self.pair.engine.drop_graphs()
        if self.pair.engine.target.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            batch[0].done = True
            self.settle([_error(batch[0].number, batch[0].row, f"out of memory: {reason}")])
            return
        self.size = len(batch) // 2
        self.log(f"out of memory with {len(batch)} rows: going on with --batch-size {self.size}")

    def settle(self, records: list[dict[str, Any]]) -> None:
        """Add records to the journal, and close the tasks that are done."""
        self.journal.add(records)
        self.open = [task for task in self.open if not task.done]

    def _record(self, task: Task) -> dict[str, Any]:
        """Make the record of a task that is done."""
        if not Document(task.ids, task.mask).learnable:
            return _error(task.number, task.row, "the base ended at once, which leaves nothing to learn from")
        split = {} if task.row.split is None else {"split": task.row.split}
        return {
            "row": task.number,
            "prompt": task.row.where,
            "source": task.row.source,
            **split,
            "base": self.base,
            "tokenizer": self.tokenizer,
            "seed": task.seed,
            "temperature": task.temperature,
            "finish": task.finish,
            "input_ids": task.ids,
            "loss_mask": [int(learnt) for learnt in task.mask],
            "shown": self.pair.tokenizer.decode(task.ids),
        }

    def _log_progress(self) -> None:
        """Print a line of progress."""
        self.last_log = time.perf_counter()
        seconds = self.last_log - self.started
        rows, tokens = len(self.journal.done) - self.done_before, self.journal.tokens - self.tokens_before
        done = len(self.journal.done) + self.skipped
        left = ""
        if self.total is not None and rows and done < self.total:
            left = f"  {seconds * (self.total - done) / rows / 60:.1f} min left"
        whole = "" if self.total is None else f"/{self.total}"
        self.log(f"row {done}{whole}  {tokens:,} tokens  {tokens / max(seconds, 1e-9):,.0f} tokens/s{left}")


def choose_batch(tasks: Sequence[Task], size: int) -> list[Task]:
    """Choose the tasks to decode next: the first, so that none waits long, and those nearest to it in length.

    Greedy and sampled rows do not mix in one call of `generate`.

    Args:
        tasks: Open tasks, in their order.
        size: Tasks to choose, at most.
    """
    first = tasks[0]
    alike = sorted(
        (task for task in tasks if (task.temperature > 0) == (first.temperature > 0)), key=lambda t: len(t.ids)
    )
    position = next(index for index, task in enumerate(alike) if task is first)
    start = max(0, min(position - size // 2, len(alike) - size))
    return alike[start : start + size]


def _error(number: int, row: Row, reason: str) -> dict[str, Any]:
    return {"row": number, "prompt": row.where, "error": reason}


def _limits(pair: Pair, config: RegenerateConfig) -> BaseLimits:
    target = pair.engine.target
    context = target.fixed_rope_context
    limits = [config.max_input_len, None if context is None else context - 1]
    max_tokens = min((tokens for tokens in limits if tokens is not None), default=None)
    return BaseLimits(frozenset(end_tokens(target.model, pair.tokenizer)), target.vocab_size, max_tokens)


def base_name(engine: Engine) -> str:
    """Return the name of a base: its hub id, or the last part of its path."""
    return short_name(str(engine.model.config.name_or_path or engine.target.name))
