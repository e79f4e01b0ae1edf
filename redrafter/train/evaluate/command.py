"""Measure a drafter for many tree shapes at once.

    redrafter evaluate --model my-base --drafter my-drafter --prompts questions.jsonl --shapes 5x5,10x5 --plot a.png

The base continues the prompts once at each temperature, by plain decoding; the steps of speculative decoding on those
texts are then counted for every shape. Without --prompts, the prompts are those that ship with the package. --explain
also counts why steps ended, and prints commands that may improve it. --prompt-lengths cuts the same prompts to several
lengths and measures each separately. --suite measures all turns of a standard suite of questions, with the base's own
answers.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from redrafter.app.flags import read_options, short_name
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions, SuiteOptions
from redrafter.app.templates import require_template
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.checkpoints.drafters import check_beams
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.suites import Suite, read_suite
from redrafter.drafting.proposer import SearchProposer
from redrafter.drafting.text_drafters import ReplayableDrafter, require
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.atomic_file import write_atomically
from redrafter.files.hub import CARD_FILE
from redrafter.files.regular_file import read_regular
from redrafter.formats.model_card import acceptance_section, make_header, make_introduction, replace_acceptance
from redrafter.measure.report import describe_pair
from redrafter.measure.suite_table import write_tables
from redrafter.train.evaluate.explain import OtherTexts, explain
from redrafter.train.evaluate.options import EvaluateOptions, Search, main
from redrafter.train.evaluate.replay import replay
from redrafter.train.evaluate.report import (
    TextsResult,
    acceptance_rows,
    advise,
    format_explanation,
    format_report,
    make_report,
    plot,
    suite_conditions,
    suite_tables,
)
from redrafter.train.evaluate.texts import PromptChoice, PromptSource, Texts, answer_suite, write_texts

MAX_NODES = 4096  # of a search; its ancestor matrix grows quadratically


def evaluate(pair: Pair, options: EvaluateOptions, suite: Suite | None = None) -> dict[str, Any]:
    """Measure a loaded pair, on a suite of questions if one is given.

    The pair's engine must be a `ReDrafter`. Returns the report of `make_report`.

    Raises:
        ArgumentError: The options do not suit the pair, or leave no prompt.
        CheckpointError: A row of the prompts cannot be read.
    """
    engine, proposer = pair.engine, pair.engine.proposer
    assert isinstance(engine, ReDrafter)
    drafter = require(ReplayableDrafter, engine.drafter)
    assert isinstance(proposer, SearchProposer)
    search = Search(proposer.beams, proposer.depth)
    for beams, depth in options.shapes or (search,):
        check_beams(engine.drafter.config, beams)
        engine.drafter.check_search(engine.target, depth)
        # Check all shapes before the base generates texts, which takes minutes.
        if (whole := 1 + beams * depth) > MAX_NODES:
            raise ArgumentError(f"--shapes {beams}x{depth} has {whole} nodes; at most {MAX_NODES} can be measured")
    trees = options.trees(search)
    if options.explain:
        # The explained tree comes first, since the explanation refers to `trees[0]`.
        trees = list(dict.fromkeys([options.explained_tree(search, engine.target.device), *trees]))
    target = engine.target
    max_tokens = _max_prompt_tokens(options, target.fixed_rope_context)

    def write(prompts: list[list[int]], temperature: float, seed: int, what: str) -> Texts:
        return write_texts(
            target,
            prompts,
            options.new_tokens,
            temperature,
            seed,
            end_ids=end_tokens(target.model, pair.tokenizer),
            batch_size=options.batch_size,
            options=engine.options,
            report=partial(_report_texts, what, len(prompts)),
        )

    results = []
    if suite is not None:
        for temperature in options.temperatures:
            # `temperature` is bound as a default: a closure would see the loop's last value.
            def answer(prompts: list[list[int]], seed: int, temperature: float = temperature) -> Texts:
                what = f"temperature {temperature:g}, after {seed - options.seed} turns"
                return write(prompts, temperature, seed, what)

            answered = answer_suite(suite, pair.tokenizer, max_tokens, options.seed, answer)
            stats = replay(drafter, target, answered.texts, trees)
            results.append(TextsResult(answered.texts, trees, stats, answered.turns, skipped=answered.skipped))
        counts = {category: len(questions) for category, questions in suite.categories.items()}
        return make_report(pair, options, PromptChoice(counts, {}), results, str(suite))
    source = PromptSource(options.prompts, pair.tokenizer, options.num_prompts, options.seed, **options.cut)
    if options.prompt_lengths:
        prompts = source.of_lengths(options.prompt_lengths)
    else:
        prompts = PromptChoice.whole(source.by_category(max_tokens))
    # Loaded before the base generates, so that errors in the data are reported first.
    others = OtherTexts.load(pair, options, max_tokens) if options.explain else None
    for temperature, length in product(options.written_temperatures, prompts.by_length):
        chosen = prompts.by_length[length]
        what = f"temperature {temperature:g}" + ("" if length is None else f", prompts of {length} tokens")
        texts = write(chosen, temperature, options.seed, what)
        stats = replay(drafter, target, texts, trees)
        results.append(TextsResult(texts, trees, stats, prompts.categories, length))
    document = make_report(pair, options, prompts, results)
    if others is not None:
        written = [result.texts for result in results]
        explanation = explain(pair, drafter, options, trees[0], prompts.categories, written, others)
        names, advice = [short_name(file) for file in explanation["data"]], list(advise(explanation))
        document["explanation"] = {**explanation, "data": names, "advice": advice}
    return document


def run_checked(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the command with options validated by `main`; `words` is the command line. Returns its exit code."""
    options, asked = read_options(EvaluateOptions, args), read_options(SuiteOptions, args)
    suite = None if asked.suite is None else read_suite(asked.suite).choose(options.num_prompts, options.seed)
    pair = Pair.load(read_options(LoadOptions, args))
    if options.adapter is not None:
        merge_adapter(pair.engine.model, options.adapter)
    if suite is not None:
        # Questions of a suite are chat turns.
        require_template(pair.tokenizer, pair.name)
    card = read_card(pair) if options.card else None  # before anything is measured
    document = evaluate(pair, options, suite) | {"command": shlex.join(["redrafter", "evaluate", *words])}
    print(*format_report(document), sep="\n")
    if options.explain:
        print(*format_explanation(document["explanation"]), sep="\n")
    if suite is not None:
        facts = [*describe_pair(document), *suite_conditions(document)]
        write_tables(suite_tables(document), facts, asked.csv, asked.markdown)
    if options.json is not None:
        write_atomically(Path(options.json), json.dumps(document, indent=1) + "\n")
    if card is not None:
        tree, rows = acceptance_rows(document)
        write_atomically(card_file(pair), replace_acceptance(card, acceptance_section(tree, rows)))
    if options.plot is not None:
        plot(document, Path(options.plot))
    return 0


def card_file(pair: Pair) -> Path:
    """Return the path of a drafter's model card."""
    return Path(str(pair.drafting_model), CARD_FILE)


def read_card(pair: Pair) -> str:
    """Return the model card of a drafter, a new one if it has none. Raises `CheckpointError` if it is not text."""
    assert isinstance(pair.engine, ReDrafter)
    file, config = card_file(pair), pair.engine.drafter.config
    if not file.exists():
        base = config.base_model or short_name(pair.name)
        return f"{make_header(config, base, pair.name)}\n{make_introduction(config, base)}"
    try:
        return read_regular(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not text in UTF-8: replace it, or leave out --card") from error


def _max_prompt_tokens(options: EvaluateOptions, context: int | None) -> int:
    """Return the maximum number of prompt tokens; raise `ArgumentError` if the options leave no room for a prompt.

    `context` is the number of tokens of the model's context; None for no limit.
    """
    if context is None:
        return sys.maxsize
    room = context - options.new_tokens
    if room < 1:
        raise ArgumentError(
            f"--new-tokens {options.new_tokens} leaves no room for a prompt in the model's context of {context}"
        )
    if max(options.prompt_lengths, default=0) > room:
        raise ArgumentError(
            f"--prompt-lengths {max(options.prompt_lengths)} and --new-tokens {options.new_tokens} are more than the "
            f"model's context of {context} tokens: give lengths of at most {room}, or fewer new tokens"
        )
    return room


def _report_texts(what: str, count: int, done: int) -> None:
    print(f"{what}: {done} of {count} texts", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
