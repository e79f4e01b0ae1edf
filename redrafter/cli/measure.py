"""`redrafter bench`, `compare` and `evaluate`: run trials of a pair on prompts, print their records as one table."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from redrafter.app import loading
from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.templates import load_chat_tokenizer
from redrafter.chat.template import chat_template_of
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.checkpoints.drafters import check_beams
from redrafter.checkpoints.tokenizers import end_tokens, load_tokenizer
from redrafter.cli.measure_options import BenchOptions, CompareOptions, EvaluateOptions, MeasureOptions, Search
from redrafter.data.suites import read_suite
from redrafter.drafting.proposer import SearchProposer
from redrafter.drafting.text_drafters import require
from redrafter.engine.engine import Engine
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import write_atomically
from redrafter.files.hub import CARD_FILE
from redrafter.formats.model_card import acceptance_section, read_or_begin, replace_acceptance
from redrafter.measure import misses
from redrafter.measure.decode import DEFAULT_BATCH_SIZE as ANSWERED_AT_ONCE
from redrafter.measure.decode import Batches, Texts, pad_token_of, repeated_share, write_texts
from redrafter.measure.prompts import PromptSource, encode, read_prompts
from redrafter.measure.record import PROMPT_LOOKUP, ROUNDS_INSIDE, UNDRAFTED, Record, Records, conditions
from redrafter.measure.replay import ReplayStats, name_tree, replay
from redrafter.measure.steps import StepWork, copy_bandwidth, measure_step
from redrafter.measure.table import SPEED, draw, format_markdown, format_records, table_of, write_csv
from redrafter.measure.trial import (
    CountedTexts,
    TransformersTrial,
    Trial,
    answer_suite,
    check_room,
    describe,
    fixed_length,
    run_trials,
    transformers_trial,
)
from redrafter.parallel.launched import launched_processes, process_rank
from redrafter.tree.beam_search import node_count
from redrafter.tree.sizes import TreeShape

WARM_UP_TOKENS = 8  # new tokens of a warm-up run of `compare` on a CPU; on a GPU a warm-up run is whole
MAX_NODES = 4096  # of a search; its ancestor matrix grows quadratically
# Columns of tables; those without a value are left out.
STEP = ("first ms", "token ms", "step ms", "draft", "floor", "verify", "its floor", "rest")
SUITE = ("texts", "skipped", "accepted", "of texts", "1")
EVALUATED = ("texts", "skipped", "tokens/step", "drafts/step", "repeated", "ended", "1")
LEGEND = "1, 2, ...: share of the steps whose drafts were accepted up to there that accepted one more"
ByCategory: TypeAlias = Mapping[str, list[list[int]]]  # prompts of each category


def bench(options: BenchOptions, load: LoadOptions) -> int:
    """Run `redrafter bench`. Returns its exit code."""
    if launched_processes() > 1 and options.against:
        raise ArgumentError("--against measures a model in one process: leave it out, or start one process")
    if process_rank() > 0:  # rank 0 alone writes files
        options = replace(options, json=None, csv=None, markdown=None, plot=None)
    return bench_pair(Pair.load(load), load, options)


def bench_pair(pair: Pair, load: LoadOptions, options: BenchOptions, note: str | None = None) -> int:
    """Measure a loaded pair, whose engine is a `ReDrafter`; `note` is a line about it. Returns the exit code."""
    engine, tokens, temperature = pair.engine, options.max_new_tokens, options.temperature
    assert isinstance(engine, ReDrafter)
    # The default of --num-prompts applies to other prompts; a suite is measured on all its questions.
    questions = None if options.num_prompts == BenchOptions.num_prompts else options.num_prompts
    at_once = max(engine.options.max_batch_size, *options.batch_sizes)  # do not split a large batch into several
    engine.options = replace(engine.options, max_batch_size=at_once)
    prompts, skipped = _prompts(pair, options, questions, tokens, temperature, options.seed)
    every = [ids for members in prompts.values() for ids in members]
    arguments = fixed_length(engine, pair.tokenizer, tokens, temperature) | {"seed": options.seed}
    if options.suite is not None:
        arguments["eos_token_id"] = sorted(end_tokens(engine.model, pair.tokenizer))
    # `generate` would write fewer tokens.
    check_room(max(map(len, every)), tokens, engine.target.context, engine.options.max_seq_len)
    bandwidth, pad_token = copy_bandwidth(engine.target.device), pad_token_of(pair.tokenizer)
    facts = _facts(pair, options, load, options) | {"bytes_per_second": bandwidth, "note": note}
    line = f"{len(every)} prompts, {tokens} new tokens each; copies move {bandwidth / 1e9:.1f} GB/s, read and written"
    with _report(facts, options, SPEED + STEP + (SUITE if options.suite else ()), note or "", line) as records:
        for rows in dict.fromkeys(options.batch_sizes):
            plain = arguments | {"speculate": False}
            undrafted = Trial(UNDRAFTED, engine, plain, pad_token, decode=pair.tokenizer.decode)
            trials = [undrafted, Trial(pair.method, engine, arguments | {"speculate": True}, pad_token)]
            for name in dict.fromkeys(options.against) if rows == 1 else ():
                trials.append(transformers_trial(undrafted, name, every))
            batches, spans = _batches(prompts, rows, None if options.suite else options.num_prompts)
            run_trials(trials, batches, options.repeats, partial(_say, f"{rows} rows"))
            for trial in trials:
                # Where speculation is off at this batch size, both modes are the same step.
                proposer = engine.undrafted if trial is undrafted else engine.proposer_for(rows)
                step: Mapping[str, Any] = {}
                if trial is undrafted or (trial is trials[1] and proposer is not engine.undrafted):
                    work = StepWork(engine, batches[0], tokens // 2, temperature, options.seed)
                    step = measure_step(work, proposer, bandwidth)
                records.add(*_describe(trial, undrafted, batches, spans, skipped, step, temperature=temperature))
    return _exit_code(records)


def compare(options: CompareOptions, load: LoadOptions, draft: DraftOptions, generation: GenerationOptions) -> int:
    """Run `redrafter compare`. Returns its exit code."""
    # With None, only the drafter's engine would read the checkpoint's temperature, and methods would not compare.
    temperature = generation.temperature or 0.0
    assert isinstance(temperature, float | int)
    seed = (0 if temperature else None) if generation.seed is None else generation.seed  # one seed for all methods
    generation = replace(generation, temperature=temperature, seed=seed)
    if options.assisted and draft.draft_model is None:
        raise ArgumentError("--assisted is for --draft-model: give that too")
    if options.assisted and generation.stop:
        raise ArgumentError("--assisted takes no --stop: transformers' assisted generation has no tokenizer for it")
    pairs = _load_pairs(*loading.check_options(load, draft))
    pair, tokens = pairs[0], generation.max_new_tokens
    prompts, skipped = _prompts(pair, options, options.num_prompts, tokens, temperature, seed or 0)
    limit = options.max_input_len or sys.maxsize
    left = sum(len(ids) > limit for members in prompts.values() for ids in members)
    prompts = _short_enough(prompts, options)
    every = [ids for members in prompts.values() for ids in members]
    undrafted = pair.trial(replace(generation, speculate=False))
    trials = [undrafted, *(each.trial(generation) for each in pairs)]
    if options.assisted:
        trials.append(_assisted(pairs, undrafted, load.trust_remote_code))
    names = {each.method: each.drafting_model for each in pairs}
    facts = _facts(pair, options, load, draft, generation, options) | {"drafters": names}
    line = f"{len(every)} prompts of {min(map(len, every))} to {max(map(len, every))} tokens, {left} longer "
    line += f"ones left out; {options.batch_size} at once, up to {tokens} new tokens each, temperature {temperature:g}"
    with _report(facts, options, (*SPEED, "kept", "1", *(SUITE if options.suite else ())), line) as records:
        batches, spans = _batches(prompts, options.batch_size, None)
        short = None if pair.engine.target.device.type == "cuda" else min(WARM_UP_TOKENS, tokens)
        run_trials(trials, batches, options.repeats, partial(_say, ""), short)
        for trial in trials:
            of = trial, undrafted, batches, spans, skipped
            records.add(*_describe(*of, {}, temperature=temperature, compare=not options.disable_output_comparison))
    if pair.engine.target.rounding:
        print(f"{pair.name} {ROUNDS_INSIDE}")
    return _exit_code(records)


def evaluate(options: EvaluateOptions, load: LoadOptions) -> int:
    """Run `redrafter evaluate`. Returns its exit code."""
    if options.card and not Path(load.drafter or "/dev/null").is_dir():
        raise ArgumentError("--card writes into the directory of a drafter: give it with --drafter")
    if not loading.has_drafter(load):
        raise ArgumentError(f"{load.model} holds no drafter that could be evaluated: give one (--drafter D)")
    pair = Pair.load(load)
    if options.adapter is not None:
        merge_adapter(pair.engine.model, options.adapter)
    file, card = Path(str(pair.drafting_model), CARD_FILE), None
    if options.card:  # read before anything is measured
        assert isinstance(pair.engine, ReDrafter)
        card = read_or_begin(file, pair.engine.drafter.config, short_name(pair.name), pair.name)
    facts = _facts(pair, options, load, options)
    line = f"at most {options.new_tokens} new tokens; prompt i has seed {options.seed} + i; no top-k, top-p or penalty"
    with _report(facts, options, EVALUATED + (SUITE if options.suite else ()), line, LEGEND) as records:
        explanation = evaluate_pair(pair, options, records)
    print(*explanation, sep="\n", end="\n" if explanation else "")
    if card is not None:
        section = acceptance_section(records.rows[0].mode, _card_rows(records.rows))
        write_atomically(file, replace_acceptance(card, section))
    return 0


def evaluate_pair(pair: Pair, options: EvaluateOptions, records: Records) -> list[str]:
    """Add records of all trees to `records`, and return the lines of an explanation, if one is asked for.

    The pair's engine must be a `ReDrafter`. Raises `ArgumentError` if the options do not suit the pair.
    """
    engine, target = pair.engine, pair.engine.target
    assert isinstance(engine, ReDrafter)
    assert isinstance(engine.proposer, SearchProposer)
    drafter, search = require(engine.drafter, "evaluate"), Search(engine.proposer.beams, engine.proposer.depth)
    for beams, depth in options.shapes or (search,):
        check_beams(engine.drafter.config, beams)
        engine.drafter.check_search(target, depth)
        # Check all shapes before the base generates texts, which takes minutes.
        if (whole := 1 + beams * depth) > MAX_NODES:
            raise ArgumentError(f"--shapes {beams}x{depth} has {whole} nodes; at most {MAX_NODES} can be measured")
    trees = options.trees(search)
    if options.explain:
        # The tree that `generate` verifies on this device, where no other is named, comes first.
        beams, depth = options.shapes[0] if options.shapes else search
        budget = node_count(next(iter(options.node_budgets), None), beams, depth, target.device)
        trees = list(dict.fromkeys([TreeShape(beams, depth, budget), *trees]))
    context = target.fixed_rope_context
    check_room(max(options.prompt_lengths, default=1), options.new_tokens, context)
    most = sys.maxsize if context is None else context - options.new_tokens
    source = PromptSource(options.prompts, pair.tokenizer, options.num_prompts, options.seed, **options.cut)
    chosen: Mapping[Any, dict[str, list[list[int]]]] = {None: {}}
    if options.prompt_lengths:
        chosen = source.of_lengths(options.prompt_lengths)
    elif options.suite is None:
        chosen = {None: source.by_category(most)}
    found, lines = list[dict[str, Any]](), list[str]()
    for temperature, length in product(options.written_temperatures, chosen):
        texts, categories, skipped = _texts(pair, options, chosen[length], temperature, most)
        for shape, stats in zip(trees, replay(drafter, target, texts, trees), strict=True):
            first, spans = 0, dict[str | None, slice]()
            for name, size in categories.items() if len(categories) > 1 else ():
                spans[name] = slice(first, first + size)
                first += size
            for category, span in (spans | {None: slice(None)}).items():
                record = Record(name_tree(shape), category, temperature, prompt_length=length)
                written = texts.continuations[span]
                record.texts, record.tokens = len(written), sum(map(len, written))
                record.skipped = skipped.get(category or "", sum(skipped.values())) if skipped else None
                record.repeated = repeated_share(written)
                record.ended = sum(texts.ended[span]) / len(written) if written else None
                record.count(ReplayStats.sum(shape, stats[span]), stats[span])
                if options.explain and shape == trees[0] and category is None:
                    record.misses = misses.explain(drafter, target, texts, shape, categories)
                    found.append(record.misses)
                    lines += ["", *misses.format_misses(record.misses, record.mode)]
                records.add(record)
    if options.explain:
        head, vocabulary = drafter.config.draft_vocab_size or target.vocab_size, target.vocab_size
        advice = misses.advise(found, trees[0], head, vocabulary, sum(categories.values()))
        lines += ["", "suggestions", *(f"  {line}" for line in advice)]
    return lines


def _texts(pair: Pair, options: EvaluateOptions, prompts: ByCategory, temperature: float, most: int) -> CountedTexts:
    """Return the texts to replay, and the numbers of texts and of skipped turns by category."""
    # By an engine that is gone when the texts are replayed, which needs the memory of its cache.
    pair = replace(pair, engine=Engine(pair.engine.target, pair.engine.undrafted, pair.engine.options))
    writer = _Writer(pair, options.new_tokens, temperature, options.batch_size)
    if options.suite is not None:
        return writer.answer(options.suite, options.num_prompts, options.seed, most)
    every = [ids for members in prompts.values() for ids in members]
    return writer.write(every, options.seed), {name: len(members) for name, members in prompts.items()}, {}


def _say(what: str, text: str) -> None:
    print(f"{what}: {text}" if what else text, file=sys.stderr, flush=True)


def _facts(pair: Pair, options: MeasureOptions, *groups: Any) -> dict[str, Any]:
    """Return the conditions of a measurement, and the options of `groups`."""
    typed = {name: value for group in groups for name, value in asdict(group).items()}
    names = {"model": short_name(pair.name), "drafter": pair.drafting_model and short_name(pair.drafting_model)}
    read = options.suite or [short_name(file) for file in options.prompts] or "those that ship"
    return {**conditions(pair.engine.target), **names, "prompts": read, "options": typed}


@contextmanager
def _report(facts: Mapping[str, Any], options: MeasureOptions, shown: Sequence[str], *lines: str) -> Iterator[Records]:
    """Yield the records to fill, and print and write the conditions and their table, also after an exception."""
    used = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    drafter = f", drafter {facts['drafter']}" if facts["drafter"] else ""
    heading = [facts["command"], f"{facts['model']}{drafter}, {facts['dtype']}", f"{facts['hardware']}; {used}", *lines]
    heading = list(filter(None, heading))
    records = Records(facts, options.json)
    try:
        yield records
    finally:
        if records.rows:
            print(*heading, "", *format_records(records.rows, shown), sep="\n")
            if options.csv is not None:
                write_csv(options.csv, records.rows)
            if options.markdown is not None:
                text = [*(f"- {line}" for line in heading), "", *format_markdown(*table_of(records.rows, shown))]
                write_atomically(Path(options.markdown), "\n".join(text) + "\n")
            if options.plot is not None:
                draw(options.plot, records.rows, f"{heading[1]}, {facts['hardware']}")


def _exit_code(records: Records) -> int:
    """Return 1 where a baseline failed, or a mode wrote other tokens than it promises and rounding does not explain."""
    ours = [record for record in records.rows if not record.mode.startswith("HF ")]
    wrong = any(not each.near_tie for record in ours for each in record.differences or ())
    return int(wrong or any(record.error for record in records.rows))


def _prompts(
    pair: Pair, options: MeasureOptions, questions: int | None, tokens: int, temperature: float, seed: int
) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """Return prompts by category, and the numbers of turns of a suite without room for so many new tokens."""
    if options.suite is None:
        rows = [row for file in options.prompts or (None,) for row in read_prompts(file)]
        return {"": encode(rows, pair.tokenizer, **options.cut)}, {}
    limits = pair.engine.options.max_seq_len, pair.engine.target.context
    most = min([most - tokens for most in limits if most] + [pair.engine.options.max_input_len or sys.maxsize])
    writer = _Writer(pair, tokens, temperature, ANSWERED_AT_ONCE)
    texts, turns, skipped = writer.answer(options.suite, questions, seed, most)
    members = iter(texts.prompts)
    return {category: list(islice(members, count)) for category, count in turns.items() if count}, skipped


class _Writer(NamedTuple):
    """Writes texts of at most `tokens` tokens by undrafted decoding, `rows` at once."""

    pair: Pair
    tokens: int
    temperature: float
    rows: int

    def answer(self, name: str, questions: int | None, seed: int, most: int) -> CountedTexts:
        """Let the model answer a suite; return what `answer_suite` does."""
        chat_template_of(self.pair.tokenizer)  # raises an error before the first line of progress
        suite = read_suite(name).choose(questions, seed)
        _say(f"temperature {self.temperature:g}", str(suite))
        return answer_suite(suite, self.pair.tokenizer, most, seed, self.write)

    def write(self, prompts: list[list[int]], seed: int) -> Texts:
        """Let the model continue prompts."""

        def report(done: int) -> None:
            _say(f"temperature {self.temperature:g}", f"{done} of {len(prompts)} texts")

        ends, settings = end_tokens(self.pair.engine.model, self.pair.tokenizer), (self.tokens, self.temperature, seed)
        return write_texts(self.pair.engine, prompts, *settings, end_ids=ends, batch_size=self.rows, report=report)


def _batches(prompts: ByCategory, rows: int, least: int | None) -> tuple[list[list[list[int]]], dict[str, range]]:
    """Return batches of prompts, each of one category, and the batches of each.

    With `least`, prompts are repeated until there are so many rows, and all batches are full.
    """
    batches: list[list[list[int]]] = []
    spans: dict[str, range] = {}
    for category, members in prompts.items():
        if least is not None:
            members = [members[row % len(members)] for row in range(-(-max(least, rows) // rows) * rows)]
        begin = len(batches)
        batches += [members[first : first + rows] for first in range(0, len(members), rows)]
        spans[category] = range(begin, len(batches))
    return batches, spans


def _describe(
    trial: Trial,
    undrafted: Trial,
    batches: Batches,
    spans: Mapping[str, range],
    skipped: Mapping[str, int],
    step: Mapping[str, Any],
    **more: Any,
) -> Iterator[Record]:
    """Yield the records of a mode: of each category, if there are several, and of all prompts with their `step`."""
    for category, span in spans.items() if len(spans) > 1 else ():
        yield describe(trial, undrafted, batches, span, category=category, skipped=skipped.get(category), **more)
    yield describe(trial, undrafted, batches, skipped=sum(skipped.values()) if skipped else None, **more, **step)


def _load_pairs(name: str, load: LoadOptions, draft: DraftOptions) -> list[Pair]:
    """Load one pair per usable drafting method, all on one target; prompt lookup is always usable."""
    methods = [
        loading.DRAFTER if loading.has_drafter(load) else loading.RECYCLED,
        *([loading.DRAFT_MODEL] if draft.draft_model else []),
        PROMPT_LOOKUP,
    ]
    loading.check_method_options(load, draft, set(methods))
    tokenizer = load_chat_tokenizer(name, load, trust_remote_code=load.trust_remote_code)
    pairs: list[Pair] = []
    for method in methods:
        # All methods share one target, so that its weights are in memory once.
        engine = loading.load_engine(method, pairs[0].engine.target if pairs else name, load, draft)
        pairs.append(Pair(name, method, loading.drafting_model_name(method, name, load, draft), tokenizer, engine))
    made = [pair.engine for pair in pairs]
    lender = next((engine for engine in made if engine.draft_model is not None), made[0])
    for engine in made:
        # Engines of one target decode in turn, so they can share the memory of the KV cache.
        lender.lend_to(engine)
    return pairs


def _short_enough(prompts: ByCategory, options: CompareOptions) -> dict[str, list[list[int]]]:
    """Return the first `--num-prompts` prompts of at most `--max-input-len` tokens."""
    most = options.max_input_len or sys.maxsize
    kept = {name: [ids for ids in members if len(ids) <= most] for name, members in prompts.items()}
    if not any(kept.values()):
        raise ArgumentError(f"no prompt has {most} tokens or fewer: raise --max-input-len")
    count = None if options.suite else options.num_prompts
    return {name: members[:count] for name, members in kept.items() if members}


def _assisted(pairs: Sequence[Pair], undrafted: Trial, trust_remote_code: bool) -> TransformersTrial:
    """Return assisted generation of transformers with the draft model of a pair."""
    pair = next(pair for pair in pairs if pair.method == loading.DRAFT_MODEL)
    draft, more = pair.engine.draft_model, dict[str, Any]()
    assert draft is not None
    if pair.engine.draft_vocabulary is not None:
        assert pair.drafting_model is not None
        own = load_tokenizer(pair.drafting_model, trust_remote_code=trust_remote_code)
        more = {"tokenizer": pair.tokenizer, "assistant_tokenizer": own}
    elif draft.vocab_size != pair.engine.target.vocab_size:
        raise ArgumentError("--assisted needs tables of one size: transformers refuses a padded draft model")
    return transformers_trial(undrafted, "assisted", [[0]], assistant_model=draft.model, count=True, **more)


def _card_rows(records: Sequence[Record]) -> Iterator[tuple[str, float, list[float]]]:
    """Yield a row for each kind of texts of the first tree, for `acceptance_section`."""
    several = any(record.category is not None for record in records)
    for record in records:
        if record.mode == records[0].mode and (record.category is not None) == several:
            name = "greedy" if record.temperature == 0 else f"temperature {record.temperature:g}"
            name += "" if record.prompt_length is None else f", after {record.prompt_length} tokens"
            shares = [count / max(record.steps or 0, 1) for count in record.accepted_by_depth or ()]
            yield name + (f", {record.category}" if several else ""), record.tokens_per_step or 0.0, shares
