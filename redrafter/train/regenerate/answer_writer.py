"""Answer the rows of a data set in batches.

With the same base, tokenizer and seed, the answer to a row does not depend on its batch.

The chat template is rendered with a marker in place of every answer, to find the text that follows an answer even if
the template transforms answers. The generated ids of an answer are kept unchanged between the ids of the template: the
next answer is decoded after exactly the ids that the base has read and generated.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.app.options import GenerationOptions
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.prompts import apply_template, check_tokenizer, encode_prompt
from redrafter.data.rows import Row, fingerprint
from redrafter.data.windows import Document
from redrafter.errors import CacheFullError, CheckpointError, MismatchError, ReDrafterError, first_line
from redrafter.measure.run import Run
from redrafter.train.regenerate.config import RegenerateConfig, shard_numbers
from redrafter.train.regenerate.journal import BatchCost, Journal, Record

MIN_BEGINNING_TOKENS, MAX_BEGINNING_TOKENS = 16, 64  # range of the prompt length of a plain text
BEGINNING_CHARS = 8192  # characters of a plain text that are tokenized for its prompt
MARKER = "AnswerOfTheBase"
INVENTED = [{"role": "user", "content": ""}]  # marks a conversation whose user turn the base generates
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
    parts: list[list[int]]  # ids before each answer; of an invented conversation, before the question and the answer
    invented: bool = False  # whether the base also generates the question, which is not trained on
    ids: list[int] = field(default_factory=list)  # all ids so far
    mask: list[bool] = field(default_factory=list)  # true for ids that the base generated
    parts_added: int = 0  # number of `parts` in `ids`
    finish: str = "eos"  # `eos`, or `length` if an answer was truncated or did not fit
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
        if part is not None and self.ids and self.ids[-1] in limits.eos:
            # The base generated its own end token, so drop the template's end of turn up to its end token.
            part = part[next((index + 1 for index, token in enumerate(part[:2]) if token in limits.eos), 0) :]
        if part is None or not limits.fits(len(self.ids) + len(part)):
            self.finish = self.finish if part is None else "length"
            self.done = True
            return
        self.ids, self.mask = self.ids + part, self.mask + [False] * len(part)
        self.parts_added += 1

    def add_answer(self, answer: Sequence[int], limits: BaseLimits) -> None:
        """Append an answer, and the ids before the next one."""
        self.ids, self.mask = self.ids + list(answer), self.mask + [not self.asking] * len(answer)
        if answer[-1] not in limits.eos and not self.asking:
            self.finish = "length"
        self.add_prompt(limits)


def make_task(
    number: int, row: Row, tokenizer: PreTrainedTokenizerBase, limits: BaseLimits, config: RegenerateConfig
) -> Task:
    """Create the task of a row, with its first prompt.

    Its seed, its temperature (one of `config.temperatures`) and the prompt length of a plain text depend only on
    `config.seed` and `number`.

    Raises:
        CheckpointError: The row has nothing to answer, or its prompt is too long.
        MismatchError: The row's ids are not of this base's tokenizer.
    """
    # A hash rather than a generator: each row's draws are independent of other rows, shards and restarts.
    # Random numbers follow the row's number alone, so that shards, batches and resumed runs give the same answers.
    digest = hashlib.blake2b(f"{config.seed}/{number}".encode(), digest_size=24).digest()
    task_seed, which, share = (int.from_bytes(digest[start : start + 8], "big") for start in (0, 8, 16))
    beginning = MIN_BEGINNING_TOKENS + share % (MAX_BEGINNING_TOKENS - MIN_BEGINNING_TOKENS + 1)
    parts = _parts(row, tokenizer, beginning)
    if not parts or not parts[0]:
        raise CheckpointError("an empty prompt")
    # Ids outside the vocabulary would fail in the embedding, on a GPU without a usable message.
    highest = max(max(part, default=0) for part in parts)
    if highest >= limits.vocab_size:
        raise MismatchError(f"token id {highest}, but the base knows {limits.vocab_size} ids")
    temperature = config.temperatures[which % len(config.temperatures)]
    task = Task(number, row, task_seed % SEED_RANGE, temperature, parts, row.messages is INVENTED)
    task.add_prompt(limits)
    if task.done:
        raise CheckpointError(f"a prompt of {len(parts[0])} tokens; at most {limits.max_tokens} leave room to write")
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


class AnswerWriter:
    """Answers rows in batches and adds their records to the journal.

    `total` is the number of rows to answer, for progress; None if unknown.
    """

    def __init__(
        self,
        pair: Pair,
        config: RegenerateConfig,
        journal: Journal,
        log: Callable[[str], object],
        total: int | None,
    ):
        self.pair, self.config, self.journal, self.log, self.total = pair, config, journal, log, total
        self.tokenizer, self.limits = fingerprint(pair.tokenizer), BaseLimits.from_pair(pair, config)
        # Without folders, so that outputs do not reveal paths.
        self.base = short_name(str(pair.engine.model.config.name_or_path or pair.engine.target.name))
        self.open: list[Task] = []  # started and not done
        self._limit_rows(config.batch_size)
        self.input = self.skipped = 0  # rows read, and rows of another split among them
        self.started = self.last_log = self.last_batch = time.perf_counter()
        self.done_before, self.tokens_before = len(journal.done), journal.tokens  # by an earlier run

    def _limit_rows(self, slots: int) -> None:
        """Let the engine decode at most `slots` rows at once, and set the size of a batch."""
        rows_per_slot = ROWS_PER_SLOT_OF_MANY if slots >= MANY_SLOTS else ROWS_PER_SLOT
        self.slots, self.size = slots, slots * rows_per_slot if slots > 1 else 1
        engine = self.pair.engine
        engine.options = replace(engine.options, max_batch_size=slots)

    def answer(self, rows: Iterable[Row]) -> None:
        """Answer all rows of this shard that are not in the journal."""
        coming = select_rows(rows, self.config)
        # Prompts of a later batch are tokenized while one is decoded: a tokenizer computes outside of the interpreter's
        # lock.
        with ThreadPoolExecutor(1, "redrafter-prompts") as thread:
            # A pool of several batches, so that rows of about the same length can be batched.
            self._open_tasks(*self._make_tasks(coming, POOL_BATCHES * self.size))
            while self.open:
                count = min((POOL_BATCHES + 1) * self.size - len(self.open), self.size)
                made = thread.submit(self._make_tasks, coming, count)
                self._answer_batch()
                self._open_tasks(*made.result())
        self._log_progress()

    def _make_tasks(
        self, coming: Iterator[tuple[int, Row, bool]], count: int
    ) -> tuple[Sequence[Task], Sequence[Record]]:
        """Make `count` tasks of the next rows, or as many as there are, and the records of invalid rows among them."""
        tasks, errors = list[Task](), list[Record]()
        while len(tasks) < count and (new := next(coming, None)) is not None:
            number, row, chosen = new
            self.input += 1
            self.skipped += not chosen
            if not chosen or number in self.journal.done:
                continue
            try:
                tasks.append(make_task(number, row, self.pair.tokenizer, self.limits, self.config))
            # An invalid row must not end a run of hours; it is recorded as failed.
            except ReDrafterError as error:
                errors.append(_error(number, row, first_line(error)))
        return tasks, errors

    def _open_tasks(self, tasks: Sequence[Task], errors: Sequence[Record]) -> None:
        self.open += tasks
        self.journal.add(errors)

    def _answer_batch(self) -> None:
        """Decode one answer for each task of a batch chosen from `open`, and add finished tasks to the journal.

        When out of memory, the batch's tasks stay open and the number of rows at once is halved; a batch of one task is
        recorded as failed.
        """
        batch, run, reason = choose_batch(self.open, self.size), None, ""
        try:
            run = self.decode(batch)
        except OUT_OF_MEMORY_ERRORS as error:
            reason = first_line(error)
        if run is None:  # outside of the handler, whose exception references the batch's tensors
            self._halve_batch(batch, reason)
            return
        for task, answer in zip(batch, run.tokens, strict=True):
            task.add_answer(answer, self.limits)
        now = time.perf_counter()
        seconds, self.last_batch = now - self.last_batch, now
        cost = BatchCost(seconds=seconds, steps=run.stats.steps, emitted=run.stats.emitted)
        self.settle([*(self._record(task) for task in batch if task.done), {"batch": cost}])
        if now - self.last_log > LOG_SECONDS:
            self._log_progress()

    def decode(self, batch: Sequence[Task]) -> Run:
        """Decode the next answer of each task."""
        config = self.config
        arguments: dict[str, Any] = {"eos_token_id": sorted(self.limits.eos)} if self.limits.eos else {}
        options = GenerationOptions(max_new_tokens=config.max_new_tokens, temperature=0.0)
        if batch[0].asking:
            tokens = min(MAX_QUESTION_TOKENS, config.max_new_tokens)
            options = GenerationOptions(max_new_tokens=tokens, temperature=QUESTION_TEMPERATURE)
            arguments["seed"] = [task.seed for task in batch]
        elif batch[0].temperature > 0:
            # A temperature above 0 enables sampling; `arguments` then override it for each row.
            options = replace(options, temperature=1.0, top_k=config.top_k, top_p=config.top_p)
            arguments["temperature"] = [task.temperature for task in batch]
            arguments["seed"] = [task.seed for task in batch]
        return self.pair.run_batch([task.ids for task in batch], options, streamer=None, **arguments)

    def _halve_batch(self, batch: Sequence[Task], reason: str) -> None:
        """Halve the rows at once; record a single row that does not fit into memory as failed."""
        # Captured graphs hold memory of the large batch.
        self.pair.engine.drop_graphs()
        if self.pair.engine.target.device.type == "cuda":
            torch.cuda.empty_cache()
        # Halving cannot help a single row: record it as failed and continue.
        if len(batch) == 1:
            batch[0].done = True
            self.settle([_error(batch[0].number, batch[0].row, f"out of memory: {reason}")])
            return
        rows = min(self.slots, len(batch))
        self._limit_rows(max(rows // 2, 1))
        self.log(f"out of memory with {rows} rows at once: continuing with --batch-size {self.slots}")

    def settle(self, records: Sequence[Record]) -> None:
        """Add records to the journal, and close the tasks that are done."""
        self.journal.add(records)
        self.open = [task for task in self.open if not task.done]

    def _record(self, task: Task) -> Record:
        if not Document(task.ids, task.mask).learnable:
            return _error(task.number, task.row, "the base ended at once, which leaves nothing to learn from")
        record: Record = {"row": task.number, "prompt": task.row.where, "source": task.row.source}
        if task.row.split is not None:
            record["split"] = task.row.split
        record |= {
            "base": self.base,
            "tokenizer": self.tokenizer,
            "seed": task.seed,
            "temperature": task.temperature,
            "finish": task.finish,
            "input_ids": task.ids,
            "loss_mask": [int(learnt) for learnt in task.mask],
            "shown": str(self.pair.tokenizer.decode(task.ids)),
        }
        return record

    def _log_progress(self) -> None:
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
    """Choose up to `size` tasks to decode next: the first one, so that none starves, and those closest in length.

    One call of `generate` cannot mix greedy and sampled rows, nor questions and answers.
    """
    first = tasks[0]
    alike = sorted((task for task in tasks if task.kind == first.kind), key=lambda task: len(task.ids))
    position = next(index for index, task in enumerate(alike) if task is first)
    start = max(0, min(position - size // 2, len(alike) - size))
    return alike[start : start + size]


def _error(number: int, row: Row, reason: str) -> Record:
    return {"row": number, "prompt": row.where, "error": reason.removeprefix(f"{row.where}: ")}


def _parts(row: Row, tokenizer: PreTrainedTokenizerBase, beginning: int) -> list[list[int]]:
    """Return the ids before each answer; for a plain text, at most `beginning` tokens."""
    if row.messages is INVENTED:
        return _invented_turn(row, tokenizer)
    if row.messages is not None:
        return _turns(row, row.messages, tokenizer)
    if row.prompt is not None:
        return [encode_prompt(row, tokenizer)]
    if row.text is not None:
        return [_beginning(tokenizer(row.text[:BEGINNING_CHARS])["input_ids"], beginning)]
    assert row.ids is not None
    check_tokenizer(row, tokenizer)
    mask = row.loss_mask or [True] * len(row.ids)
    if True not in mask:
        raise CheckpointError('nothing in "loss_mask" is true, so there is nothing to answer')
    return [row.ids[: mask.index(True)] or _beginning(row.ids, beginning)]


def _beginning(ids: list[int], max_tokens: int) -> list[int]:
    """Return the beginning of a text, at most half of it, so that a continuation remains to be generated."""
    return ids[: min(max_tokens, (len(ids) + 1) // 2)]


def _turns(row: Row, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids before each assistant turn of a conversation; without such turns, after each user turn."""
    asked = [turn for turn in messages if turn["role"] != "assistant"]
    if not any(turn["role"] == "user" for turn in asked):
        raise CheckpointError("no user turn, so there is nothing to answer")
    marker = MARKER
    # The marker must not occur in the conversation itself.
    while any(marker in turn["content"] for turn in asked):
        marker += "Z"
    answer, chat, parts = {"role": "assistant", "content": marker}, list[dict[str, str]](), list[list[int]]()
    for turn in messages:
        if turn["role"] != "assistant":
            chat.append(turn)
            if len(asked) < len(messages) or turn["role"] != "user":
                continue
        parts.append(_render(row, chat, marker, tokenizer))
        chat.append(answer)
    return parts


def _invented_turn(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids before the content of a first user turn, and those between it and the assistant's answer."""
    text = apply_template(row, [{"role": "user", "content": MARKER}], tokenizer, add_generation_prompt=True)
    before, found, _ = text.partition(MARKER)
    if not found or not before:
        raise CheckpointError("the chat template puts nothing before a user's question, so the base cannot invent one")
    opening = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    return [opening, ids_after(text[len(before) :], len(MARKER), tokenizer)]


def _render(row: Row, chat: list[dict[str, str]], marker: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the template puts between the last answer of a chat and the next one.

    For a chat without answers, returns the ids of the whole chat.
    """
    if not any(turn["role"] == "user" for turn in chat):
        raise CheckpointError("the assistant speaks before any user turn")
    text = apply_template(row, chat, tokenizer, add_generation_prompt=True)
    if not any(turn["role"] == "assistant" for turn in chat):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if marker not in text:
        raise CheckpointError("the chat template leaves the assistant's last turn out")
    # Only the text after the last answer is new: earlier turns are already in the tokens, as the base wrote them.
    return ids_after(text[text.rindex(marker) :], len(marker), tokenizer)


def ids_after(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode `text[start:]` in the context of the preceding text, since many tokenizers add a leading space."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        # A token that spans the boundary cannot be split, so encode the rest separately.
        if not any(first < start < end for first, end in spans):
            return [token for token, (_, end) in zip(encoded["input_ids"], spans, strict=True) if end > start]
    return list(tokenizer(text[start:], add_special_tokens=False)["input_ids"])
