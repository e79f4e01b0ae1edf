"""`redrafter compare`: measure drafting methods on the same prompts, and compare their outputs token by token."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.app.engines import (
    DRAFT_MODEL,
    DRAFTER,
    DRAFTING_METHODS,
    PLAIN,
    PROMPT_LOOKUP,
    check_method_options,
    drafting_model_name,
    load_engine,
)
from redrafter.app.flags import read_options
from redrafter.app.loading import Pair, check_options
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.templates import load_chat_tokenizer
from redrafter.bench.options import CompareOptions
from redrafter.checkpoints.drafters import holds_drafter
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.engine.call import GenerateStats
from redrafter.errors import ArgumentError
from redrafter.measure.differences import ROUNDS_INSIDE, Difference, describe_differences, find_differences
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Report, conditions, describe_pair
from redrafter.measure.run import PromptIds, RepeatedRuns, Run, describe_stats, run_in_turn, transformers_run

ASSISTED = "HF assisted"
WARM_UP_TOKENS = 8  # new tokens of a warm-up run on a CPU; on a GPU a warm-up run is whole, to capture all graphs
COLUMNS = (("", 14), ("tokens/s", 9), ("x plain", 8), ("tokens/step", 12), ("drafts kept", 12), ("same outputs", 24))


@dataclass
class ComparedMethod(RepeatedRuns):
    """A method of decoding and its runs."""

    pair: Pair = field(kw_only=True)  # the target with the engine of this method
    generation: GenerationOptions = field(kw_only=True)

    @property
    def exact(self) -> bool:
        """Whether the method guarantees the tokens of plain decoding."""
        return not (self.pair.engine.rejection_sampling and self.generation.sampling)

    def run_batch(self, batch: PromptIds, first: int, **changes: Any) -> Run:
        """Decode a batch that follows `first` other prompts, with overridden options, and time it.

        Prompt i has the seed `seed + i` for any batch size.
        """
        seed = self.generation.seed
        seeded = replace(self.generation, seed=None if seed is None else seed + first)
        self.pair.engine.forget_prefixes()
        return self.decode(batch, replace(seeded, **changes))

    def decode(self, batch: PromptIds, generation: GenerationOptions) -> Run:
        """Decode a batch of prompts, given as token ids, and time it."""
        return self.pair.run_batch(batch, generation)


@dataclass
class AssistedMethod(ComparedMethod):
    """Assisted generation of transformers with the pair's draft model and transformers' own settings."""

    draft_tokenizer: PreTrainedTokenizerBase | None = None  # of the draft model, where it is not the target's

    @property
    def exact(self) -> bool:
        """Whether the tokens equal plain decoding's: not when sampling, since transformers draws different noise."""
        return not self.generation.sampling

    def decode(self, batch: PromptIds, generation: GenerationOptions) -> Run:
        """Decode prompts, given as token ids, one at a time, and sum their times."""
        model, draft = self.pair.engine.model, self.pair.engine.draft_model
        assert draft is not None
        arguments = self.pair.arguments(generation) | {"assistant_model": draft.model, "count": True}
        seed = arguments.pop("seed") or 0
        del arguments["speculate"]
        if self.draft_tokenizer is not None:
            arguments |= {"tokenizer": self.pair.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        runs = [transformers_run(model, prompt, seed + row, **arguments) for row, prompt in enumerate(batch)]
        stats = GenerateStats.from_rows([run.stats for run in runs], None)
        return Run([run.tokens[0] for run in runs], stats, sum(run.seconds for run in runs))


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: validate the options, decode each batch with every method, and print the report."""
    options, generation = read_options(CompareOptions, args), read_options(GenerationOptions, args)
    # With None, only the drafter's engine would read the checkpoint's temperature, and methods would not compare.
    generation = replace(generation, temperature=generation.temperature or 0.0)
    if generation.sampling and generation.seed is None:
        generation = replace(generation, seed=0)  # one seed for all methods
    load, draft = read_options(LoadOptions, args), read_options(DraftOptions, args)
    if options.assisted and draft.draft_model is None:
        raise ArgumentError("--assisted is for --draft-model: give that too")
    if options.assisted and generation.stop:
        raise ArgumentError("--assisted takes no --stop: transformers' assisted generation has no tokenizer for it")
    rows, output = read_prompts(options.prompts), options.output
    if output and options.prompts and Path(output).resolve() == Path(options.prompts).resolve():
        raise ArgumentError("--output would overwrite the prompts: give another name")
    pairs = _load_pairs(*check_options(load, draft))
    prompts, left_out = select_prompts(
        encode(rows, pairs[0].tokenizer, **options.cut), options, pairs[0].engine.target.context
    )
    plain = ComparedMethod(
        pair=replace(pairs[0], method=PLAIN, drafting_model=None), generation=replace(generation, speculate=False)
    )
    methods = [plain, *(ComparedMethod(pair=pair, generation=generation) for pair in pairs)]
    if options.assisted:
        methods.append(_assisted_method(pairs, generation, load.trust_remote_code))
    batches = [prompts[start : start + options.batch_size] for start in range(0, len(prompts), options.batch_size)]
    most = generation.max_new_tokens
    short = most if pairs[0].engine.target.device.type == "cuda" else min(WARM_UP_TOKENS, most)
    for method in methods:  # warm up once for each batch size: first calls capture and compile
        for batch in {len(batch): batch for batch in batches}.values():
            method.run_batch(batch, 0, max_new_tokens=short)
    least, longest = (f(map(len, prompts)) for f in (min, max))
    found = {"count": len(prompts), "left_out": left_out, "shortest": least, "longest": longest}
    facts: dict[str, Any] = {
        **conditions(pairs[0].engine.target),
        "model": pairs[0].name,
        "prompts": {"file": options.prompts} | found,
        "options": asdict(load) | asdict(draft) | asdict(generation) | asdict(options),
    }
    report = Report(facts, path=output)
    report.line(
        *describe_pair(facts),
        f"{len(prompts)} prompts of {least} to {longest} tokens, {left_out} longer ones left out; "
        f"{options.batch_size} at once, up to {most} new tokens each, temperature {generation.temperature:g}",
    )
    ran = run_in_turn([method.run_batch for method in methods], batches, options.repeats, report.progress)
    for method, runs in zip(methods, ran, strict=True):
        method.repeats = runs.repeats
    decode = pairs[0].tokenizer.decode
    report.document["texts"] = [
        {"prompt": decode(prompt), "plain": decode(text)} for prompt, text in zip(prompts, plain.texts(), strict=True)
    ]
    table, failed = report.table("", COLUMNS), False
    for method in methods:
        result = _result(method, plain, prompts, compare=not options.disable_output_comparison)
        # A difference in transformers' own method is reported, but does not fail the command.
        failed |= result["first_difference"] is not None and not isinstance(method, AssistedMethod)
        report.add("ways", result)
        kept = f"{result['accepted'] / result['drafted']:.0%}" if result["drafted"] else None
        ties = f", {result['near_ties']} near-ties" if result["near_ties"] else ""
        same = None if result["same"] is None else f"{result['same']} of {len(prompts)}{ties}"
        speeds = (result[name] for name in ("tokens_per_second", "speedup", "tokens_per_step"))
        table(result["way"], *speeds, kept, same)
        report.line(*describe_differences(result["differences"], result["way"]))
    if pairs[0].engine.target.rounding:
        report.line(f"{pairs[0].name} {ROUNDS_INSIDE}")
    return report.finish() or int(failed)


def _load_pairs(name: str, load: LoadOptions, draft: DraftOptions) -> list[Pair]:
    """Load one pair per usable drafting method, all on one target; prompt lookup is always usable."""
    has_drafter = load.drafter is not None or holds_drafter(name)
    usable = {DRAFTER: has_drafter, DRAFT_MODEL: draft.draft_model is not None, PROMPT_LOOKUP: True}
    methods = [method for method in DRAFTING_METHODS if usable[method]]
    check_method_options(load, draft, set(methods))
    tokenizer = load_chat_tokenizer(name, load, trust_remote_code=load.trust_remote_code)
    pairs: list[Pair] = []
    for method in methods:
        # All methods share one target, so that its weights are in memory once.
        engine = load_engine(method, pairs[0].engine.target if pairs else name, load, draft)
        pairs.append(Pair(name, method, drafting_model_name(method, name, load, draft), tokenizer, engine))
    engines = [pair.engine for pair in pairs]
    lender = next((engine for engine in engines if engine.draft_model is not None), engines[0])
    for engine in engines:
        # Engines of one target decode in turn, so they can share the memory of the KV cache.
        lender.lend_to(engine)
    return pairs


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
    """Return the prompts to decode and the number of prompts that are too long."""
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


def _result(method: ComparedMethod, plain: ComparedMethod, prompts: PromptIds, *, compare: bool) -> dict[str, Any]:
    """Return a method's entry of `ways` in the document; compares outputs if the method guarantees equal tokens."""
    pair, rows = method.pair, max(len(run.tokens) for run in method.repeats[0])
    compared = compare and method is not plain and method.exact
    differences: list[Difference] = []
    if compared:
        outputs = [method.texts(repeat) for repeat in range(len(method.repeats))]
        arguments, decode = plain.pair.arguments(plain.generation), plain.pair.tokenizer.decode
        differences = find_differences(plain.pair.engine, arguments, prompts, plain.texts(), outputs, decode)
    true_differences = [(each.prompt, each.token) for each in differences if not each.near_tie]
    return {
        "way": pair.method,
        "name": pair.drafting_model,
        "shape": pair.engine.proposer_for(rows).sizes if pair.method in DRAFTING_METHODS else None,
        "tokens": sum(map(len, method.texts())),
        # The next three are medians over repeats; `describe_stats` covers the first repeat.
        "seconds": statistics.median(method.seconds),
        "tokens_per_second": statistics.median(method.tokens_per_second),
        "speedup": method.speedup(plain),
        **describe_stats(method.stats),
        "same": len(prompts) - len(differences) if compared else None,  # how many outputs
        "near_ties": len(differences) - len(true_differences) if compared else None,
        "first_difference": next(iter(true_differences), None),
        "differences": differences,  # the worst one of each output that differs
    }
