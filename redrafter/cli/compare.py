"""`redrafter compare`: measure drafting methods on the same prompts, and compare their outputs token by token."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from redrafter.app.engines import DRAFT_MODEL, PLAIN
from redrafter.app.flags import read_options
from redrafter.app.loading import Pair, check_options
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.bench.options import CompareOptions
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.cli.compared_methods import ASSISTED, AssistedMethod, Method, load_pairs, measure_result
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable
from redrafter.measure.differences import describe_differences
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Report, conditions, describe_pair

__all__ = ["decode_batches", "run", "select_prompts"]

WARM_UP_TOKENS = 8  # new tokens of a warm-up run on a CPU; on a GPU a warm-up run is whole, to capture all graphs
COLUMNS = (("", 14), ("tokens/s", 9), ("x plain", 8), ("tokens/step", 12), ("drafts kept", 12), ("same outputs", 24))


def run(args: argparse.Namespace) -> int:
    """Run the command: check the options, decode batch by batch with each method in turn, print the report."""
    options, generation = read_options(CompareOptions, args), read_options(GenerationOptions, args)
    # A temperature of None would be the checkpoint's own, which only the drafter's engine knows.
    generation = replace(generation, temperature=generation.temperature or 0.0)
    if generation.sampling and generation.seed is None:
        generation = replace(generation, seed=0)  # one seed for all methods
    load, draft = read_options(LoadOptions, args), read_options(DraftOptions, args)
    if options.assisted and draft.draft_model is None:
        raise ArgumentError("--assisted is for --draft-model: give that too")
    if options.assisted and generation.stop:
        raise ArgumentError("--assisted takes no --stop: transformers' assisted generation has no tokenizer for it")
    rows = read_prompts(options.prompts)
    output = None if options.output is None else Path(options.output)
    if output is not None:
        check_writable(output, "--output")
        if options.prompts is not None and output.resolve() == Path(options.prompts).resolve():
            raise ArgumentError("--output would overwrite the prompts: give another name")
    pairs = load_pairs(*check_options(load, draft))
    prompts, left_out = select_prompts(
        encode(rows, pairs[0].tokenizer, **options.cut), options, pairs[0].engine.target.context
    )
    plain = Method(
        pair=replace(pairs[0], method=PLAIN, drafting_model=None), generation=replace(generation, speculate=False)
    )
    methods = [plain, *(Method(pair=pair, generation=generation) for pair in pairs)]
    if options.assisted:
        methods.append(_assisted_method(pairs, generation, load.trust_remote_code))
    batches = [prompts[start : start + options.batch_size] for start in range(0, len(prompts), options.batch_size)]
    _warm_up(methods, batches)
    lengths = [len(prompt) for prompt in prompts]
    found = {"count": len(prompts), "left_out": left_out, "shortest": min(lengths), "longest": max(lengths)}
    facts = conditions(pairs[0].engine.target) | {
        "model": pairs[0].name,
        "prompts": {"file": options.prompts} | found,
        "options": asdict(load) | asdict(draft) | asdict(generation) | asdict(options),
    }
    report = Report(facts, path=output, flag="--output")
    for line in describe_pair(facts):
        report.line(line)
    report.line(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {left_out} longer ones left out; "
        f"{options.batch_size} at once, up to {generation.max_new_tokens} new tokens each, "
        f"temperature {generation.temperature:g}"
    )
    decode_batches(methods, batches, options, report)
    decode = pairs[0].tokenizer.decode
    report.document["texts"] = [
        {"prompt": decode(prompt), "plain": decode(text)} for prompt, text in zip(prompts, plain.texts(), strict=True)
    ]
    same = _report_results(methods, prompts, options, report)
    return report.finish() or int(not same)


def _assisted_method(pairs: Sequence[Pair], generation: GenerationOptions, trust_remote_code: bool) -> AssistedMethod:
    pair = next(pair for pair in pairs if pair.method == DRAFT_MODEL)
    assert pair.engine.draft_model is not None
    draft_tokenizer = None
    if pair.engine.draft_vocabulary is not None:
        assert pair.drafting_model is not None
        draft_tokenizer = load_tokenizer(pair.drafting_model, trust_remote_code=trust_remote_code)
    elif pair.engine.draft_model.vocab_size != pair.engine.target.vocab_size:
        raise ArgumentError("--assisted needs tables of one size: transformers refuses a padded draft model")
    return AssistedMethod(pair=replace(pair, method=ASSISTED), generation=generation, draft_tokenizer=draft_tokenizer)


def select_prompts(
    prompts: list[list[int]], options: CompareOptions, context: int | None
) -> tuple[list[list[int]], int]:
    """Return the prompts to decode, and how many were left out because they are too long."""
    most = options.max_input_len
    short_enough = [prompt for prompt in prompts if most is None or len(prompt) <= most]
    longest = max(map(len, short_enough), default=0)
    if context is not None and longest >= context:
        raise ArgumentError(
            f"the longest prompt has {longest} tokens and the model's context is {context}: leave such out with "
            "--max-input-len"
        )
    if not short_enough:
        raise ArgumentError(f"no prompt has {most} tokens or fewer: raise --max-input-len")
    return short_enough[: options.num_prompts], len(prompts) - len(short_enough)


def _warm_up(methods: Sequence[Method], batches: Sequence[list[list[int]]]) -> None:
    """Decode one batch of each size with each method, so that no timed run is the first of its kind."""
    for method in methods:
        new_tokens = min(WARM_UP_TOKENS, method.generation.max_new_tokens)
        on_gpu = method.pair.engine.target.device.type == "cuda"
        generation = method.generation if on_gpu else replace(method.generation, max_new_tokens=new_tokens)
        for batch in {len(batch): batch for batch in batches}.values():
            method.run(batch, generation)


def decode_batches(
    methods: Sequence[Method], batches: Sequence[list[list[int]]], options: CompareOptions, report: Report
) -> None:
    """Decode all batches with all methods `options.repeats` times, and append the runs to each method's `repeats`.

    Each batch is decoded with every method before the next batch, so that other load of the machine slows all alike.
    """
    for repeat in range(options.repeats):
        for method in methods:
            method.repeats.append([])
        for index, batch in enumerate(batches):
            report.progress(f"repeat {repeat + 1} of {options.repeats}, batch {index + 1} of {len(batches)}")
            for method in methods:
                generation, first = method.generation, index * options.batch_size
                # Prompt i has the seed `generation.seed + i`, whatever the batch size.
                seed = None if generation.seed is None else generation.seed + first
                method.repeats[-1].append(method.run(batch, replace(generation, seed=seed)))


def _report_results(
    methods: Sequence[Method], prompts: Sequence[Sequence[int]], options: CompareOptions, report: Report
) -> bool:
    """Report the result of each method.

    Returns:
        Whether every method of this library that promises plain decoding's tokens has them, but for near-ties.
    """
    plain, table, same = methods[0], report.table("", COLUMNS), True
    for method in methods:
        result = measure_result(method, plain, prompts, compare=not options.disable_output_comparison)
        if not isinstance(method, AssistedMethod):  # a difference of transformers' own method is no failure of ours
            same = same and result["first_difference"] is None
        report.add("ways", result)
        kept = f"{result['accepted'] / result['drafted']:.0%}" if result["drafted"] else None
        ties = f", {result['near_ties']} near-ties" if result["near_ties"] else ""
        found = None if result["same"] is None else f"{result['same']} of {len(prompts)}{ties}"
        speeds = (result[name] for name in ("tokens_per_second", "speedup", "tokens_per_step"))
        table.row(result["way"], *speeds, kept, found)
        for line in describe_differences(result["differences"], result["way"]):
            report.line(line)
    return same
