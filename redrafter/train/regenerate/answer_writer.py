"""Rows of a data set, answered in batches: as long as the base, its tokenizer and the seeds are the same, a row is
answered the same whatever its batch."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.app.options import GenerationOptions
from redrafter.data.rows import Row, fingerprint
from redrafter.data.windows import Document
from redrafter.engine.engine import Engine
from redrafter.engine.stopping import end_tokens
from redrafter.errors import CacheFullError, ReDrafterError, first_line
from redrafter.measure.run import Run
from redrafter.train.regenerate.config import RegenerateConfig
from redrafter.train.regenerate.journal import Journal
from redrafter.train.regenerate.tasks import Limits, Task, task_of

__all__ = ["Writer", "base_name", "mine", "next_batch"]

POOL = 8  # batches among which rows of one length are looked for
NO_MEMORY = (CacheFullError, torch.OutOfMemoryError, MemoryError)
EVERY = 10.0  # seconds between lines of progress


def mine(rows: Iterable[Row], config: RegenerateConfig) -> Iterator[tuple[int, Row, bool]]:
    """The rows of this shard, up to the limit, each with its number in the data set and whether it is to be answered:
    those of another split are not."""
    index, count = config.part
    wanted = 0
    for number, row in enumerate(rows):
        if wanted == config.limit:
            return
        chosen = (row.split or "train") == config.split
        wanted += chosen
        if number % count == index:
            yield number, row, chosen


class Writer:
    """What is between the rows and the journal: the rows that are open, and batches of them."""

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
        self.began = self.told = self.clock = time.perf_counter()
        self.before = len(journal.done), journal.tokens  # by an earlier call

    def go(self, rows: Iterable[Row]) -> None:
        coming = mine(rows, self.config)
        while True:
            self._admit(coming)
            if not self.open:
                break
            self._write()
        self._tell()

    def _admit(self, coming: Iterator[tuple[int, Row, bool]]) -> None:
        """Open rows, as many as make good batches."""
        while len(self.open) < POOL * self.size and (new := next(coming, None)) is not None:
            number, row, chosen = new
            self.input += 1
            self.skipped += not chosen
            if not chosen or number in self.journal.done:
                continue
            config, tokenizer = self.config, self.pair.tokenizer
            try:
                task = task_of(number, row, tokenizer, self.limits, seed=config.seed, temperatures=config.temperatures)
            except ReDrafterError as error:
                self.journal.add([_error(number, row, first_line(error))])
            else:
                self.open.append(task)

    def _write(self) -> None:
        """Decode one batch."""
        batch, found, reason = next_batch(self.open, self.size), None, ""
        try:
            found = self._decode(batch)
        except NO_MEMORY as error:
            reason = first_line(error)
        if found is None:  # by now nothing holds the batch's tensors
            self._shrink(batch, reason)
            return
        for task, written in zip(batch, found.tokens, strict=True):
            task.take(written, self.limits)
        now = time.perf_counter()
        took = {"seconds": now - self.clock, "steps": found.stats.steps, "emitted": found.stats.emitted}
        self.clock = now
        self._settle([self._record(task) for task in batch if task.done] + [{"batch": took}])
        if now - self.told > EVERY:
            self._tell()

    def _decode(self, batch: Sequence[Task]) -> Run:
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

    def _shrink(self, batch: Sequence[Task], reason: str) -> None:
        """Go on with half of what did not fit into memory; a row that does not fit alone has failed."""
        self.pair.engine.drop_graphs()
        if self.pair.engine.target.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            batch[0].done = True
            self._settle([_error(batch[0].number, batch[0].row, f"out of memory: {reason}")])
            return
        self.size = len(batch) // 2
        self.log(f"out of memory with {len(batch)} rows: going on with --batch-size {self.size}")

    def _settle(self, records: list[dict[str, Any]]) -> None:
        self.journal.add(records)
        self.open = [task for task in self.open if not task.done]

    def _record(self, task: Task) -> dict[str, Any]:
        """The line of a row that is done."""
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
            "loss_mask": [int(own) for own in task.mask],
            "shown": self.pair.tokenizer.decode(task.ids),
        }

    def _tell(self) -> None:
        """A line of progress."""
        self.told = time.perf_counter()
        seconds = self.told - self.began
        rows, tokens = len(self.journal.done) - self.before[0], self.journal.tokens - self.before[1]
        done = len(self.journal.done) + self.skipped
        left = ""
        if self.total is not None and rows and done < self.total:
            left = f"  {seconds * (self.total - done) / rows / 60:.1f} min left"
        whole = "" if self.total is None else f"/{self.total}"
        self.log(f"row {done}{whole}  {tokens:,} tokens  {tokens / max(seconds, 1e-9):,.0f} tokens/s{left}")


def next_batch(tasks: Sequence[Task], size: int) -> list[Task]:
    """Of the open rows, in their order, those to decode next: the first, which so never waits long, and those nearest
    to it in length. Greedy and sampled rows do not mix in one call of `generate`."""
    first = tasks[0]
    alike = sorted(
        (task for task in tasks if (task.temperature > 0) == (first.temperature > 0)), key=lambda t: len(t.ids)
    )
    place = next(index for index, task in enumerate(alike) if task is first)
    start = max(0, min(place - size // 2, len(alike) - size))
    return alike[start : start + size]


def _error(number: int, row: Row, reason: str) -> dict[str, Any]:
    return {"row": number, "prompt": row.where, "error": reason}


def _limits(pair: Pair, config: RegenerateConfig) -> Limits:
    target = pair.engine.target
    context = target.fixed_rope_context
    most = [config.max_input_len, None if context is None else context - 1]
    longest = min((tokens for tokens in most if tokens is not None), default=None)
    return Limits(frozenset(end_tokens(target.model, pair.tokenizer)), target.vocab_size, longest)


def base_name(engine: Engine) -> str:
    """What a base is called: its hub id, or its directory without what is above it."""
    return short_name(str(engine.model.config._name_or_path or engine.target.name))
