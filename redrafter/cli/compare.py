"""`redrafter compare`: measure drafting methods on the same prompts, and compare their outputs token by token."""

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
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
from redrafter.bench.options import CompareOptions
from redrafter.checkpoints.merged import holds_drafter
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.engine.call import GenerateStats
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable
from redrafter.measure.differences import Difference, describe_differences, find_differences
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Report, conditions, describe_pair
from redrafter.measure.run import Prompts, Repeats, Run, Stopwatch, describe_stats, run_in_turn
from redrafter.scheduler.sequence import Stats

ASSISTED = "HF assisted"
WARM_UP_TOKENS = 8  # new tokens of a warm-up run on a CPU; on a GPU a warm-up run is whole, to capture all graphs
COLUMNS = (("", 14), ("tokens/s", 9), ("x plain", 8), ("tokens/step", 12), ("drafts kept", 12), ("same outputs", 24))


@dataclass
class Method(Repeats):
    """A method of decoding and its runs."""

    pair: Pair = field(kw_only=True)  # the target with the engine of this method
    generation: GenerationOptions = field(kw_only=True)

    @property
    def exact(self) -> bool:
        """Whether the method promises the tokens of plain decoding."""
        return not (self.pair.engine.rejection_sampling and self.generation.sampling)

    def run(self, batch: Prompts, generation: GenerationOptions) -> Run:
        """Decode a batch of prompts, given as token ids, and time it."""
        self.pair.engine.forget_prefixes()
        return self.pair.run(batch, generation, streamer=None)

    def run_after(self, batch: Prompts, first: int) -> Run:
        """Decode a batch with `first` prompts before it: prompt i has the seed `seed + i`, whatever the batch size."""
        seed = self.generation.seed
        return self.run(batch, replace(self.generation, seed=None if seed is None else seed + first))


@dataclass
class AssistedMethod(Method):
    """Assisted generation of transformers with the pair's draft model and transformers' own settings.

    A step is a forward pass of the target; the first one reads the prompt too.
    """

    draft_tokenizer: PreTrainedTokenizerBase | None = None  # of the draft model, where it is not the target's

    @property
    def exact(self) -> bool:
        """Whether the tokens are those of plain decoding: not when sampling, since transformers draws other noise."""
        return not self.generation.sampling

    def run(self, batch: Prompts, generation: GenerationOptions) -> Run:
        """Decode prompts, given as token ids, one after the other, and time that."""
        model, draft = self.pair.engine.model, self.pair.engine.draft_model
        assert draft is not None
        arguments = self.pair.arguments(generation)
        seed = arguments.pop("seed") or 0
        del arguments["speculate"]
        if self.draft_tokenizer is not None:
            arguments |= {"tokenizer": self.pair.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        texts, stats = [], []
        with Stopwatch(model.device) as watch:
            for row, prompt in enumerate(batch):
                ids = torch.tensor([prompt], device=model.device)  # [1, P]
                torch.manual_seed(seed + row)
                forwards = Counter[str]()
                hook = model.register_forward_hook(lambda *_, forwards=forwards: forwards.update(["target"]))
                mask = torch.ones_like(ids)
                try:
                    out = model.generate(ids, attention_mask=mask, assistant_model=draft.model, **arguments)
                finally:
                    hook.remove()
                texts.append(out[0, len(prompt) :].tolist())
                stats.append(Stats(steps=forwards["target"], emitted=len(texts[-1])))
        return Run(texts, GenerateStats.of(stats, None), watch.seconds)


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
    pairs = _load_pairs(*check_options(load, draft))
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
    for method in methods:  # one batch of each size, so that no timed run is the first of its kind
        on_gpu = method.pair.engine.target.device.type == "cuda"
        most = method.generation.max_new_tokens if on_gpu else WARM_UP_TOKENS
        short = replace(method.generation, max_new_tokens=min(most, method.generation.max_new_tokens))
        for batch in {len(batch): batch for batch in batches}.values():
            method.run(batch, short)
    lengths = [len(prompt) for prompt in prompts]
    found = {"count": len(prompts), "left_out": left_out, "shortest": min(lengths), "longest": max(lengths)}
    facts = conditions(pairs[0].engine.target) | {
        "model": pairs[0].name,
        "prompts": {"file": options.prompts} | found,
        "options": asdict(load) | asdict(draft) | asdict(generation) | asdict(options),
    }
    report = Report(facts, path=output, flag="--output")
    report.line(
        *describe_pair(facts),
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {left_out} longer ones left out; "
        f"{options.batch_size} at once, up to {generation.max_new_tokens} new tokens each, "
        f"temperature {generation.temperature:g}",
    )
    ran = run_in_turn([method.run_after for method in methods], batches, options.repeats, report.progress)
    for method, runs in zip(methods, ran, strict=True):
        method.repeats = runs.repeats
    decode = pairs[0].tokenizer.decode
    report.document["texts"] = [
        {"prompt": decode(prompt), "plain": decode(text)} for prompt, text in zip(prompts, plain.texts(), strict=True)
    ]
    same = _report_results(methods, prompts, options, report)
    return report.finish() or int(not same)


def _load_pairs(name: str, load: LoadOptions, draft: DraftOptions) -> list[Pair]:
    """Load one pair for each drafting method that can be used, all on one target: prompt lookup needs nothing."""
    has_drafter = load.drafter is not None or holds_drafter(name)
    usable = {DRAFTER: has_drafter, DRAFT_MODEL: draft.draft_model is not None, PROMPT_LOOKUP: True}
    methods = [method for method in DRAFTING_METHODS if usable[method]]
    check_method_options(load, draft, set(methods))
    tokenizer = load_tokenizer(name, trust_remote_code=load.trust_remote_code)
    pairs: list[Pair] = []
    for method in methods:
        engine = load_engine(method, pairs[0].engine.target if pairs else name, load, draft)
        pairs.append(Pair(name, method, drafting_model_name(method, name, load, draft), tokenizer, engine))
    engines = [pair.engine for pair in pairs]
    lender = next((engine for engine in engines if engine.draft_model is not None), engines[0])
    for engine in engines:
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


def _report_results(methods: Sequence[Method], prompts: Prompts, options: CompareOptions, report: Report) -> bool:
    """Report the result of each method.

    Returns:
        Whether every method of this library that promises plain decoding's tokens has them, but for near-ties.
    """
    plain, table, same = methods[0], report.table("", COLUMNS), True
    for method in methods:
        result = _result(method, plain, prompts, compare=not options.disable_output_comparison)
        if not isinstance(method, AssistedMethod):  # a difference of transformers' own method is no failure of ours
            same = same and result["first_difference"] is None
        report.add("ways", result)
        kept = f"{result['accepted'] / result['drafted']:.0%}" if result["drafted"] else None
        ties = f", {result['near_ties']} near-ties" if result["near_ties"] else ""
        found = None if result["same"] is None else f"{result['same']} of {len(prompts)}{ties}"
        speeds = (result[name] for name in ("tokens_per_second", "speedup", "tokens_per_step"))
        table.row(result["way"], *speeds, kept, found)
        report.line(*describe_differences(result["differences"], result["way"]))
    return same


def _result(method: Method, plain: Method, prompts: Prompts, *, compare: bool) -> dict[str, Any]:
    """Summarise the runs of a method, and `compare` its outputs with those of plain decoding if it promises these.

    Returns:
        An entry of `ways` in the JSON document: the method (`way`), the `name` of its drafter or draft model and the
        `shape` that it drafts, where it has such; `tokens`; `seconds`, `tokens_per_second` and `speedup` over plain
        decoding, each the median over repeats; how speculation went in the first repeat; how many outputs are the
        `same` and how many differ at `near_ties`, None where they are not compared; prompt and token of the
        `first_difference` that is no near-tie; and the worst of the `differences` of each output that differs.
    """
    rows = max(len(run.tokens) for run in method.repeats[0])
    same = near_ties = None
    differences: list[Difference] = []
    if method is not plain and method.exact and compare:
        outputs = [method.texts(repeat) for repeat in range(len(method.repeats))]
        arguments, decode = plain.pair.arguments(plain.generation), plain.pair.tokenizer.decode
        differences = find_differences(plain.pair.engine, arguments, prompts, plain.texts(), outputs, decode)
        same, near_ties = len(prompts) - len(differences), sum(difference.near_tie for difference in differences)
    pair = method.pair
    true_differences = ((each.prompt, each.token) for each in differences if not each.near_tie)
    return {
        "way": pair.method,
        "name": pair.drafting_model,
        "shape": pair.engine.proposer_for(rows).sizes if pair.method in DRAFTING_METHODS else None,
        "tokens": sum(map(len, method.texts())),
        "seconds": statistics.median(method.seconds),
        "tokens_per_second": statistics.median(method.tokens_per_second),
        "speedup": method.speedup(plain),
        **describe_stats(method.stats),
        "same": same,
        "near_ties": near_ties,
        "first_difference": next(true_differences, None),
        "differences": differences,
    }
