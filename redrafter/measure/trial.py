"""Continue prompts in several modes in turn, and record what each did: a pair, prompts and a mode make a record."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from transformers import GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from redrafter.data.suites import Dialogues, Suite
from redrafter.engine.call import GenerateStats
from redrafter.engine.engine import Engine
from redrafter.errors import ArgumentError
from redrafter.measure.decode import (
    Batches,
    PromptIds,
    RepeatedRuns,
    Run,
    Texts,
    pad_token_of,
    timed_run,
    transformers_run,
)
from redrafter.measure.record import Record, find_differences

Write: TypeAlias = Callable[[list[list[int]], int], Texts]  # continues prompts, with the seed of the first
CountedTexts: TypeAlias = tuple[Texts, dict[str, int], dict[str, int]]  # and counts of answered and of skipped turns


@dataclass
class Trial:
    """A mode of decoding, and its runs.

    Prompt i of all prompts has the seed of the arguments plus i, for any batch size.
    """

    mode: str
    engine: Engine
    arguments: dict[str, Any]  # of `generate`
    pad_token: int  # pads prompts of a batch to one length
    exact: bool = True  # whether the mode promises the tokens of undrafted decoding
    decode: Callable[[list[int]], Any] = lambda tokens: ""  # makes text of tokens, to show where texts differ
    ran: RepeatedRuns = field(default_factory=RepeatedRuns)
    first_call_s: float | None = None
    error: str | None = None  # why it cannot decode

    def run_batch(self, batch: PromptIds, first: int, **changes: Any) -> Run:
        """Decode a batch that follows `first` other prompts, with other arguments."""
        arguments = self.arguments | {"seed": self.arguments["seed"] + first} | changes
        return timed_run(self.engine, batch, self.pad_token, **arguments)


@dataclass
class TransformersTrial(Trial):
    """`model.generate` of transformers, one prompt at a time, under the arguments that it has too."""

    pad_to: int = 0  # length that prompts are padded to

    def run_batch(self, batch: PromptIds, first: int, **changes: Any) -> Run:
        """Decode the prompts of a batch one by one, and sum their times."""
        arguments = self.arguments | changes
        seed = arguments.pop("seed") + first
        arguments.pop("speculate", None)
        pad = self.pad_to, self.pad_token
        runs = [
            transformers_run(self.engine.model, prompt, seed + row, pad=pad, **arguments)
            for row, prompt in enumerate(batch)
        ]
        stats = GenerateStats.from_rows([run.stats for run in runs], None)
        return Run([run.tokens[0] for run in runs], stats, sum(run.seconds for run in runs))


def run_trials(
    trials: Sequence[Trial],
    batches: Batches,
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
    warm_up_tokens: int | None = None,
) -> None:
    """Decode all batches in all modes `repeats` times, after one untimed run of each mode for each batch size.

    Each batch is decoded in every mode before the next one, so that other load on the machine affects all alike; the
    order of the modes is reversed in every second repeat, so that none always runs on a warmer device. A mode of
    transformers that fails in its first run has an `error` and is left out. `warm_up_tokens` limits the untimed runs.
    """
    short = {} if warm_up_tokens is None else {"max_new_tokens": warm_up_tokens}
    for trial in trials:
        for batch in {len(batch): batch for batch in reversed(batches)}.values():
            trial.engine.forget_prefixes()
            try:
                run = trial.run_batch(batch, 0, **short)
            except Exception as error:
                # A baseline of another library must not end the measurement.
                if not isinstance(trial, TransformersTrial):
                    raise
                trial.error = f"{type(error).__name__}: {error}"
                break
            trial.first_call_s = trial.first_call_s or run.seconds
    able = [trial for trial in trials if trial.error is None]
    for repeat in range(repeats):
        for trial in able:
            trial.ran.repeats.append([])
        first = 0
        for index, batch in enumerate(batches):
            progress(f"repeat {repeat + 1} of {repeats}, batch {index + 1} of {len(batches)}")
            for trial in reversed(able) if repeat % 2 else able:
                trial.engine.forget_prefixes()
                trial.ran.repeats[-1].append(trial.run_batch(batch, first))
            first += len(batch)


def describe(
    trial: Trial, undrafted: Trial, batches: Batches, of: range | None = None, *, compare: bool = True, **more: Any
) -> Record:
    """Return the record of a mode on the batches `of`, by default all.

    Texts are compared with the tokens of `undrafted`, where the mode promises them and unless `compare` is false.
    `more` are further values of the record.
    """
    of = range(len(batches)) if of is None else of
    prompts = [prompt for index in of for prompt in batches[index]]
    record = Record(trial.mode, batch_size=max(map(len, batches)), texts=len(prompts), error=trial.error, **more)
    if trial.error is not None or not prompts:
        return record
    ran, reference = trial.ran.part(of), undrafted.ran.part(of)
    record.tokens = sum(map(len, ran.texts()))
    record.count(ran.stats, ran.stats.rows)
    record.seconds, record.tokens_per_second = statistics.median(ran.seconds), statistics.median(ran.tokens_per_second)
    record.speedup, record.first_call_s = ran.speedup(reference), trial.first_call_s
    runs = [run for runs in ran.repeats for run in runs]
    firsts = [run.first_token for run in runs if run.first_token is not None]
    if firsts:
        record.first_token_ms = 1e3 * statistics.median(firsts)
        following = [max(map(len, run.tokens)) - 1 for run in runs]
        if all(following):
            spans = zip(runs, firsts, following, strict=True)
            record.ms_per_token = statistics.median(1e3 * (run.seconds - first) / count for run, first, count in spans)
    if compare and trial is not undrafted and trial.exact:
        before = sum(map(len, batches[: of.start]))
        arguments = undrafted.arguments | {"seed": undrafted.arguments["seed"] + before}
        outputs = [ran.texts(repeat) for repeat in range(len(ran.repeats))]
        found = find_differences(undrafted.engine, arguments, prompts, reference.texts(), outputs, undrafted.decode)
        record.same, record.differences = len(prompts) - len(found), found
        record.near_ties = sum(difference.near_tie for difference in found)
    return record


def fixed_length(engine: Engine, tokenizer: Tokenizer, tokens: int, temperature: float) -> dict[str, Any]:
    """Return arguments of `generate` for texts of `tokens` tokens each, which no end token ends.

    The model's generation config loses its own sampling and end tokens, so that times of texts compare.
    """
    engine.model.generation_config = GenerationConfig(pad_token_id=pad_token_of(tokenizer))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}  # transformers defaults to 50
    return {"max_new_tokens": tokens} | (sampling if temperature else {"do_sample": False})


def check_room(prompt: int, new_tokens: int, *limits: int | None) -> None:
    """Raise `ArgumentError` if a prompt of so many tokens and its new ones are more than a limit; None is none."""
    for limit in limits:
        if limit is not None and prompt + new_tokens > limit:
            raise ArgumentError(
                f"a prompt of {prompt} tokens and {new_tokens} new ones are more than the {limit} of the model's "
                "context or of --max-seq-len: give shorter prompts, or ask for fewer new tokens"
            )


def transformers_trial(undrafted: Trial, name: str, prompts: PromptIds, **more: Any) -> TransformersTrial:
    """Return a mode of transformers: "eager", "static" (a compiled static cache), or another with `more` arguments."""
    more |= {"cache_implementation": "static"} if name == "static" else {}
    # torch.compile specialises a static cache on its length: pad prompts to one length to compile once.
    pad_to = max(map(len, prompts)) if name == "static" else 0
    exact = not undrafted.arguments["do_sample"]  # a sampling baseline draws different noise
    return TransformersTrial(
        f"HF {name}", undrafted.engine, undrafted.arguments | more, undrafted.pad_token, exact, pad_to=pad_to
    )


def answer_suite(suite: Suite, tokenizer: Tokenizer, most: int, seed: int, write: Write) -> CountedTexts:
    """Answer all turns of a suite's questions, by category; each turn's prompt includes all turns before it.

    Prompts have at most `most` tokens. `write(prompts, seed)` continues prompt i with `seed + i`; the seeds of all
    categories' turns count up from `seed`. Returns the texts, and by category the numbers of answered and of skipped
    turns, whose prompts are too long. Raises `ArgumentError` if no prompt is short enough.
    """
    texts: Texts | None = None
    turns, skipped = dict[str, int](), dict[str, int]()
    for category, questions in suite.categories.items():
        dialogues, before = Dialogues(questions, tokenizer, most), sum(turns.values())
        turns[category] = 0
        # A turn's prompt contains the answers before it, so turns are generated one after another.
        while prompts := dialogues.next_prompts():
            written = write(prompts, seed + before + turns[category])
            texts = written if texts is None else texts + written
            turns[category] += len(prompts)
            dialogues.answer(written.continuations)
        skipped[category] = dialogues.skipped
    if texts is None:
        raise ArgumentError(f"--suite: no turn has a prompt of at most {most} tokens, which the model's context leaves")
    return texts, turns, skipped
