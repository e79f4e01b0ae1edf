"""Answer the rows of a data set in batches.

With the same base, tokenizer and seed, the answer to a row does not depend on its batch.

The generated ids of an answer are kept unchanged between the ids of the template: the next answer is decoded after
exactly the ids that the base has read and generated. A conversation ends before the result of a tool that the base has
not called in the same way.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.app.options import GenerationOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.rows import Row, fingerprint
from redrafter.data.windows import Document
from redrafter.engine.detokenizer import decode_texts
from redrafter.errors import CacheFullError, CheckpointError, MismatchError, ReDrafterError, first_line
from redrafter.measure.decode import Run
from redrafter.train.regenerate.answer_file import Answer, AnswerFile
from redrafter.train.regenerate.config import RegenerateConfig, shard_numbers
from redrafter.train.regenerate.parts import INVENTED, AnswerPrompt, split_row

MIN_BEGINNING_TOKENS, MAX_BEGINNING_TOKENS = 16, 64  # range of the prompt length of a plain text
# At temperature 1, a base of 135M parameters starts one question in five with gibberish.
QUESTION_TEMPERATURE, MAX_QUESTION_TOKENS = 0.9, 128
SEED_RANGE = 1 << 62  # seeds are less than this

# A batch is decoded in one call, in which waiting rows take the slots of those that end. With one row for each slot,
# ever more slots would be empty until the longest answer of each batch ends.
ROWS_PER_SLOT = 4
# Many slots write a batch of so few rows in seconds, of which the longest answers leave most slots empty for a part: a
# sixth of the steps, where answers have 180 tokens and at most 320. A kill loses a batch, some 15 s of work.
MANY_SLOTS, ROWS_PER_SLOT_OF_MANY = 64, 16
POOL_BATCHES = 2  # pool size in batches, from which rows of similar length are batched
OUT_OF_MEMORY_ERRORS = (CacheFullError, torch.OutOfMemoryError, MemoryError)
LOG_SECONDS = 10.0  # between lines of progress


@dataclass(frozen=True)
class BaseLimits:
    """Limits of a base."""

    eos: frozenset[int]  # ids that end an answer
    vocab_size: int  # ids that the base knows
    max_tokens: int | None  # maximum number of prompt tokens; None for no limit

    @classmethod
    def from_pair(cls, pair: Pair, config: RegenerateConfig) -> "BaseLimits":
        """Derive the limits from a pair's base and from `config`."""
        target = pair.engine.target
        context = target.fixed_rope_context
        limits = [config.max_input_len, None if context is None else context - 1]
        max_tokens = min((tokens for tokens in limits if tokens is not None), default=None)
        return cls(frozenset(end_tokens(target.model, pair.tokenizer)), target.vocab_size, max_tokens)

    def fits(self, length: int) -> bool:
        """Return whether a prompt of `length` tokens leaves room for an answer."""
        return self.max_tokens is None or length <= self.max_tokens


@dataclass
class Task:
    """A row in progress."""

    number: int  # number of the row in the data set
    row: Row
    seed: int  # seed of its answers
    temperature: float  # temperature of its answers
    parts: list[AnswerPrompt]  # ids before each answer; of an invented conversation, before the question and the answer
    invented: bool = False  # whether the base also generates the question, which is not trained on
    ids: list[int] = field(default_factory=list)  # all ids so far
    mask: list[bool] = field(default_factory=list)  # true for ids that the base generated
    parts_added: int = 0  # number of `parts` in `ids`
    finish: str = "eos"  # `eos`, `length` if an answer was truncated or did not fit, `tool` before a result
    done: bool = False  # whether all answers are generated

    @property
    def asking(self) -> bool:
        """Whether the base generates the question next."""
        return self.invented and self.parts_added == 1

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key that all tasks of a batch share: whether they generate questions, and whether they sample."""
        return self.asking, self.temperature > 0

    def add_prompt(self, limits: BaseLimits) -> None:
        """Append the ids before the next answer; mark the task as done if there is no next answer or no room for it."""
        part = self.parts[self.parts_added] if self.parts_added < len(self.parts) else None
        ended = bool(self.ids) and self.ids[-1] in limits.eos
        if part is not None and not part.follows(self.ids[:-1] if ended else self.ids):
            part, self.finish = None, "tool"
        following = [] if part is None else part.ids
        if ended:
            # The base generated its own end token, so drop the template's end of turn up to its end token. Where the
            # two differ, as of a base that ends with the mark of the next turn's role, the template's is read.
            end = next((index for index, token in enumerate(following[:2]) if token in limits.eos), None)
            if end is not None and following[end] != self.ids[-1]:
                self.ids, self.mask = self.ids[:-1], self.mask[:-1]
            elif end is not None:
                following = following[end + 1 :]
        if part is None or not limits.fits(len(self.ids) + len(following)):
            self.finish = self.finish if part is None else "length"
            self.done = True
            return
        self.ids, self.mask = self.ids + following, self.mask + [False] * len(following)
        self.parts_added += 1

    def add_answer(self, answer: Sequence[int], limits: BaseLimits) -> None:
        """Append an answer, and the ids before the next one."""
        self.ids, self.mask = self.ids + list(answer), self.mask + [not self.asking] * len(answer)
        if answer[-1] not in limits.eos and not self.asking:
            self.finish = "length"
        self.add_prompt(limits)


class RowDraws(NamedTuple):
    """Holds the random choices for a row, which follow from the seed of the run and the number of the row alone."""

    seed: int  # of its answers
    temperature: float  # one of `RegenerateConfig.temperatures`
    beginning: int  # prompt length of a plain text

    @classmethod
    def of_row(cls, number: int, config: RegenerateConfig) -> "RowDraws":
        """Draw for the row of a number."""
        # A hash rather than a generator, so that shards, batches and resumed runs give the same answers.
        digest = hashlib.blake2b(f"{config.seed}/{number}".encode(), digest_size=24).digest()
        seed, which, share = (int.from_bytes(digest[start : start + 8], "big") for start in (0, 8, 16))
        beginning = MIN_BEGINNING_TOKENS + share % (MAX_BEGINNING_TOKENS - MIN_BEGINNING_TOKENS + 1)
        return cls(seed % SEED_RANGE, config.temperatures[which % len(config.temperatures)], beginning)


def make_task(number: int, row: Row, tokenizer: PreTrainedTokenizerBase, limits: BaseLimits, draws: RowDraws) -> Task:
    """Create the task of a row, with its first prompt.

    Raises:
        CheckpointError: The row has nothing to answer, or its prompt is too long.
        MismatchError: The row's ids are not of this base's tokenizer.
    """
    parts = split_row(row, tokenizer, draws.beginning, limits.eos)
    if not parts or not parts[0].ids:
        raise CheckpointError("an empty prompt")
    # Ids outside the vocabulary would fail in the embedding, on a GPU without a usable message.
    highest = max(max(part.ids, default=0) for part in parts)
    if highest >= limits.vocab_size:
        raise MismatchError(f"token id {highest}, but the base knows {limits.vocab_size} ids")
    task = Task(number, row, draws.seed, draws.temperature, parts, row.messages is INVENTED)
    task.add_prompt(limits)
    if task.done:
        message = f"a prompt of {len(parts[0].ids)} tokens; at most {limits.max_tokens} leave room to write"
        raise CheckpointError(message)
    return task


def select_rows(rows: Iterable[Row], config: RegenerateConfig) -> Iterator[tuple[int, Row, bool]]:
    """Yield the rows of this shard, up to the limit.

    `config` defines the shard, the split and the limit. Yields the row's number in the data set, the row, and whether
    it belongs to the split that is answered.
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


def invented_rows(count: int) -> Iterator[Row]:
    """Yield rows of conversations whose question the base generates."""
    for number in range(1, count + 1):
        yield Row(f"invented:{number}", messages=INVENTED, source="invented")


@dataclass
class Summary:
    """Counts of a run; each row that was read is found, answered, an error or skipped."""

    input: int = 0  # rows read
    found: int = 0  # rows that the file held
    answered: int = 0  # rows that this run answered
    errors: int = 0
    skipped: int = 0  # rows of another split
    ended_at_tools: int = 0  # answered rows that end before the result of a tool
    tokens: int = 0  # of answers
    emitted: int = 0  # tokens that the base wrote, of questions too
    steps: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Rows that are no longer to answer."""
        return self.found + self.answered + self.errors + self.skipped


class AnswerWriter:
    """Answers rows in batches and appends them to a file.

    `total` is the number of rows to answer, for progress; None if unknown.
    """

    def __init__(
        self, pair: Pair, config: RegenerateConfig, file: AnswerFile, log: Callable[[str], object], total: int | None
    ):
        self.pair, self.config, self.file, self.log, self.total = pair, config, file, log, total
        self.tokenizer, self.limits = fingerprint(pair.tokenizer), BaseLimits.from_pair(pair, config)
        # Without folders, so that outputs do not reveal paths.
        self.base = short_name(str(pair.engine.model.config.name_or_path or pair.engine.target.name))
        self.open: list[Task] = []  # started and not done
        self._limit_rows(config.batch_size)
        self.summary, self.first_error = Summary(), ""
        self.started = self.last_log = time.perf_counter()
        self.deadline = math.inf if config.minutes is None else self.started + 60 * config.minutes

    def _limit_rows(self, slots: int) -> None:
        """Let the engine decode at most `slots` rows at once, and set the size of a batch."""
        rows_per_slot = ROWS_PER_SLOT_OF_MANY if slots >= MANY_SLOTS else ROWS_PER_SLOT
        self.slots, self.size = slots, slots * rows_per_slot if slots > 1 else 1
        engine = self.pair.engine
        engine.options = replace(engine.options, max_batch_size=slots)

    def answer(self, rows: Iterable[Row]) -> None:
        """Answer all rows of this shard that the file does not hold."""
        coming = select_rows(rows, self.config)
        self._log_progress()
        try:
            self._answer_batches(coming)
        except KeyboardInterrupt:
            saved = len(self.file.found) + self.summary.answered
            raise KeyboardInterrupt(f"{saved:,} rows are saved; the same command continues") from None
        self.summary.seconds = time.perf_counter() - self.started
        self._log_progress()

    def _answer_batches(self, coming: Iterator[tuple[int, Row, bool]]) -> None:
        # Prompts of a later batch are tokenized while one is decoded: a tokenizer computes outside of the interpreter's
        # lock.
        with ThreadPoolExecutor(1, "redrafter-prompts") as thread:
            # A pool of several batches, so that rows of about the same length can be batched.
            self.open += self._make_tasks(coming, POOL_BATCHES * self.size)
            while self.open and time.perf_counter() < self.deadline:
                count = min((POOL_BATCHES + 1) * self.size - len(self.open), self.size)
                made = thread.submit(self._make_tasks, coming, count)
                self._answer_batch()
                self.open += made.result()
        if self.open:
            self.summary.input -= len(self.open)
            self.log("--minutes are over: the same command continues")

    def _make_tasks(self, coming: Iterator[tuple[int, Row, bool]], count: int) -> list[Task]:
        """Make `count` tasks of the next rows that the file does not hold, or as many as there are."""
        tasks = list[Task]()
        while len(tasks) < count and (new := next(coming, None)) is not None:
            number, row, chosen = new
            self.summary.input += 1
            draws = RowDraws.of_row(number, self.config)
            if not chosen:
                self.summary.skipped += 1
            elif self.file.holds(self._identity(number, row, draws)):
                self.summary.found += 1
            else:
                try:
                    tasks.append(make_task(number, row, self.pair.tokenizer, self.limits, draws))
                # An invalid row must not end a run of hours.
                except ReDrafterError as error:
                    self._fail(number, row, first_line(error))
        return tasks

    def _identity(self, number: int, row: Row, draws: RowDraws | Task) -> Answer:
        of_base: Answer = {"row": number, "prompt": row.where, "base": self.base, "tokenizer": self.tokenizer}
        return {**of_base, "seed": draws.seed, "temperature": draws.temperature}

    def _fail(self, number: int, row: Row, reason: str) -> None:
        """Count and report a row that cannot be answered."""
        reason = reason.removeprefix(f"{row.where}: ")
        self.first_error = self.first_error or f"{row.where}: {reason}"
        self.summary.errors += 1
        self.log(f"row {number} fails: {row.where}: {reason}")

    def _answer_batch(self) -> None:
        """Decode one answer for each task of a batch chosen from `open`, and append finished tasks to the file.

        When out of memory, the batch's tasks stay open and the number of rows at once is halved; a batch of one task
        fails.
        """
        batch, run, reason = choose_batch(self.open, self.size), None, ""
        try:
            run = self.decode(batch)
        except OUT_OF_MEMORY_ERRORS as error:
            reason = first_line(error)
        if run is None:  # outside of the handler, whose exception references the batch's tensors
            self._halve_batch(batch, reason)
            return
        late = time.perf_counter() >= self.deadline
        most = self._most_tokens(batch[0])
        for task, answer in zip(batch, run.tokens, strict=True):
            # The deadline cuts answers short, and leaves one token of padding, which may end answers too, of a row that
            # was not begun.
            if not late or (len(answer) > 1 and (answer[-1] in self.limits.eos or len(answer) == most)):
                task.add_answer(answer, self.limits)
        self.summary.steps += run.stats.steps
        self.summary.emitted += run.stats.emitted
        self.settle([task for task in batch if task.done])
        if time.perf_counter() - self.last_log > LOG_SECONDS:
            self._log_progress()

    def decode(self, batch: Sequence[Task]) -> Run:
        """Decode the next answer of each task."""
        config = self.config
        arguments: dict[str, Any] = {"eos_token_id": sorted(self.limits.eos)} if self.limits.eos else {}
        if self.deadline < math.inf:
            arguments["max_time"] = max(self.deadline - time.perf_counter(), 0.0)
        options = GenerationOptions(max_new_tokens=self._most_tokens(batch[0]), temperature=0.0)
        if batch[0].asking:
            options = replace(options, temperature=QUESTION_TEMPERATURE)
            arguments["seed"] = [task.seed for task in batch]
        elif batch[0].temperature > 0:
            # A temperature above 0 enables sampling; `arguments` then override it for each row.
            options = replace(options, temperature=1.0, top_k=config.top_k, top_p=config.top_p)
            arguments["temperature"] = [task.temperature for task in batch]
            arguments["seed"] = [task.seed for task in batch]
        return self.pair.trial(options).run_batch([task.ids for task in batch], 0, **arguments)

    def _most_tokens(self, task: Task) -> int:
        """Return the maximum number of tokens that the base generates next for a task."""
        most = self.config.max_new_tokens
        return min(MAX_QUESTION_TOKENS, most) if task.asking else most

    def _halve_batch(self, batch: Sequence[Task], reason: str) -> None:
        """Halve the rows at once; a single row that does not fit into memory fails."""
        # Captured graphs hold memory of the large batch.
        self.pair.engine.drop_graphs()
        if self.pair.engine.target.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:  # halving cannot help
            batch[0].done = True
            self._fail(batch[0].number, batch[0].row, f"out of memory: {reason}")
            self.settle([])
            return
        rows = min(self.slots, len(batch))
        self._limit_rows(max(rows // 2, 1))
        self.log(f"out of memory with {rows} rows at once: continuing with --batch-size {self.slots}")

    def settle(self, tasks: Sequence[Task]) -> None:
        """Append answered tasks to the file, and close all that are done."""
        answered = list[Task]()
        for task in tasks:
            if Document(task.ids, task.mask).learnable:
                answered.append(task)
            else:
                self._fail(task.number, task.row, "the base ended at once, which leaves nothing to learn from")
        texts = decode_texts(self.pair.tokenizer, [task.ids for task in answered])
        self.file.add(map(self._record, answered, texts))
        self.summary.answered += len(answered)
        self.summary.tokens += sum(sum(task.mask) for task in answered)
        self.summary.ended_at_tools += sum(task.finish == "tool" for task in answered)
        self.open = [task for task in self.open if not task.done]

    def _record(self, task: Task, shown: str) -> Answer:
        record = self._identity(task.number, task.row, task) | {"source": task.row.source}
        if task.row.split is not None:
            record["split"] = task.row.split
        return record | {
            "finish": task.finish,
            "input_ids": task.ids,
            "loss_mask": [*map(int, task.mask)],
            "shown": shown,
        }

    def _log_progress(self) -> None:
        self.last_log = time.perf_counter()
        seconds = self.last_log - self.started
        done, answered, tokens = self.summary.done, self.summary.answered, self.summary.tokens
        left = ""
        if self.total is not None and answered and done < self.total:
            left = f"  {seconds * (self.total - done) / answered / 60:.1f} min left"
        whole = "" if self.total is None else f"/{self.total}"
        self.log(f"row {done}{whole}  {tokens:,} tokens  {tokens / max(seconds, 1e-9):,.0f} tokens/s{left}")


def choose_batch(tasks: Sequence[Task], size: int) -> list[Task]:
    """Choose up to `size` tasks to decode next: the first one, so that none starves, and those closest in length.

    One call of `generate` cannot mix greedy and sampled rows, nor questions and answers.
    """
    first = tasks[0]
    alike = sorted((task for task in tasks if task.kind == first.kind), key=lambda task: len(task.ids))
    position = next(index for index, task in enumerate(alike) if task is first)
    start = max(0, min(position - size // 2, len(alike) - size))
    return alike[start : start + size]
