"""`redrafter compare`: ways of drafting side by side, their outputs compared token by token."""

import argparse
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from redrafter.app.engines import DRAFT_MODEL, DRAFTER, LOOKUP, WAYS, check_flags, drafts_by, load_engine, shape
from redrafter.app.flags import read_options
from redrafter.app.loading import Pair, checked
from redrafter.app.options import CompareOptions, DraftOptions, GenerationOptions, LoadOptions
from redrafter.checkpoints.merged import holds_drafter
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.cli.differences import Difference, find_differences, parting
from redrafter.engine.outputs import GenerateStats, Stats
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.facts import hardware, versions
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Report
from redrafter.measure.run import Run
from redrafter.measure.stopwatch import Stopwatch

__all__ = ["run"]

PLAIN, ASSISTED = "plain", "HF assisted"
WARM_UP = 8  # new tokens of the runs on a CPU that pay for what only first runs pay; a GPU captures whole ones
COLUMNS = (("", 14), ("tokens/s", 9), ("x plain", 8), ("tokens/step", 12), ("drafts kept", 12), ("same outputs", 24))


@dataclass(frozen=True)
class Result:
    """One way. seconds: of all prompts, the median over repeats. speedup: over plain decoding, the median of the
    repeats' own ratios of tokens/s. same: outputs equal to plain decoding's; near_ties: those that part at a near-tie;
    both None where that is not promised or not asked. first_difference: prompt and new token of the first output that
    parts where there is none. differences: every output that parts."""

    way: str
    name: str | None
    shape: dict[str, int] | None
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float
    accepted_by_depth: list[int]
    same: int | None
    near_ties: int | None
    first_difference: tuple[int, int] | None
    differences: list[Difference]


@dataclass
class _Way:
    """A way of decoding, and its runs: one list of batches per repeat."""

    pair: Pair
    writing: GenerationOptions
    runs: list[list[Run]] = field(default_factory=list)

    def seconds(self, repeat: int) -> float:
        return sum(run.seconds for run in self.runs[repeat])

    def speed(self, repeat: int) -> float:
        return sum(run.count for run in self.runs[repeat]) / self.seconds(repeat)

    def texts(self, repeat: int = 0) -> list[list[int]]:
        return [row for run in self.runs[repeat] for row in run.tokens]

    @property
    def exact(self) -> bool:
        """Whether plain decoding's tokens are promised."""
        engine = self.pair.engine
        return not (engine.rejection_sampling and self.writing.sampling)

    def run(self, batch: Sequence[Sequence[int]], writing: GenerationOptions) -> Run:
        self.pair.engine.forget_prefixes()
        return self.pair.run(batch, writing, streamer=None)


class _Assisted(_Way):
    """transformers' own way with the pair's draft model, as it is set up there. A step is a forward of the target; the
    first reads the prompt too."""

    @property
    def exact(self) -> bool:
        return not self.writing.sampling  # its noise is its own

    def run(self, batch: Sequence[Sequence[int]], writing: GenerationOptions) -> Run:
        model, draft = self.pair.engine.model, self.pair.engine.draft_model
        assert draft is not None
        arguments = self.pair.arguments(writing)
        seed = arguments.pop("seed") or 0
        del arguments["speculate"]
        texts, stats = [], []
        with Stopwatch(model.device) as watch:
            for row, prompt in enumerate(batch):
                ids = torch.tensor([prompt], device=model.device)
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
    """Refuse what cannot be compared, then decode batch by batch with each way in turn."""
    options, writing = read_options(CompareOptions, args), read_options(GenerationOptions, args)
    writing = replace(writing, temperature=writing.temperature or 0.0)  # the same for ways that know no checkpoint
    if writing.sampling and writing.seed is None:
        writing = replace(writing, seed=0)  # all ways draw the same
    load, draft = read_options(LoadOptions, args), read_options(DraftOptions, args)
    if options.assisted and draft.draft_model is None:
        raise ArgumentError("--assisted is for --draft-model: give that too")
    if options.assisted and writing.stop:
        raise ArgumentError("--assisted takes no --stop: transformers' assisted generation has no tokenizer for it")
    rows = read_prompts(options.prompts)
    out = None if options.output is None else Path(options.output)
    if out is not None:
        check_writable(out, "--output")
        if options.prompts is not None and out.resolve() == Path(options.prompts).resolve():
            raise ArgumentError("--output would overwrite the prompts: give another name")
    pairs = _load(*checked(load, draft))
    prompts, left_out = _fitting(
        encode(rows, pairs[0].tokenizer, **options.cut), options, pairs[0].engine.target.context
    )
    plain = _Way(replace(pairs[0], way=PLAIN, drafts=None), replace(writing, speculate=False))
    ways = [plain, *(_Way(pair, writing) for pair in pairs)]
    if options.assisted:
        own = next(pair for pair in pairs if pair.way == DRAFT_MODEL)
        assert own.engine.draft_model is not None
        if own.engine.draft_model.vocab_size != own.engine.target.vocab_size:
            raise ArgumentError("--assisted needs tables of one size: transformers refuses a padded draft model")
        ways.append(_Assisted(replace(own, way=ASSISTED), writing))
    batches = [prompts[start : start + options.batch_size] for start in range(0, len(prompts), options.batch_size)]
    _warm_up(ways, batches)
    facts = _facts(pairs[0], prompts, left_out, asdict(load) | asdict(draft) | asdict(writing) | asdict(options))
    report = Report(facts, path=out, flag="--output")
    for line in _head(facts, options, writing):
        report.line(line)
    _decode(ways, batches, options, report)
    decoded = pairs[0].tokenizer.decode
    report.document["texts"] = [
        {"prompt": decoded(prompt), "plain": decoded(text)} for prompt, text in zip(prompts, plain.texts(), strict=True)
    ]
    table, same = report.table("", COLUMNS), True
    for way in ways:
        result = _result(way, plain, prompts, options)
        if not isinstance(way, _Assisted):  # what it promises is not ours to fail for
            same = same and result.first_difference is None
        report.add("ways", result)
        table.row(*_cells(result, len(prompts)))
        for line in parting(result.differences, result.way):
            report.line(line)
    return report.finish() or int(not same)


def _load(name: str, load: LoadOptions, draft: DraftOptions) -> list[Pair]:
    """Every way that there is something for, on one target."""
    drafter = load.drafter is not None or holds_drafter(name)
    ways = [way for way, there in ((DRAFTER, drafter), (DRAFT_MODEL, draft.draft_model), (LOOKUP, True)) if there]
    check_flags(load, draft, set(ways))
    tokenizer = load_tokenizer(name, trust_remote_code=load.trust_remote_code)
    pairs: list[Pair] = []
    for way in ways:
        model = pairs[0].engine.target if pairs else name
        pairs.append(
            Pair(name, way, drafts_by(way, name, load, draft), tokenizer, load_engine(way, model, load, draft))
        )
    engines = [pair.engine for pair in pairs]
    lender = next((each for each in engines if each.draft_model is not None), engines[0])
    for engine in engines:
        lender.lend_to(engine)
    return pairs


def _fitting(prompts: list[list[int]], options: CompareOptions, context: int | None) -> tuple[list[list[int]], int]:
    """The prompts to write on from, and how many were too long."""
    most = options.max_input_len
    fit = [prompt for prompt in prompts if most is None or len(prompt) <= most]
    longest = max(map(len, fit), default=0)
    if context is not None and longest >= context:
        raise ArgumentError(
            f"the longest prompt has {longest} tokens and the model's context is {context}: leave such out with "
            "--max-input-len"
        )
    if not fit:
        raise ArgumentError(f"no prompt has {most} tokens or fewer: raise --max-input-len")
    return fit[: options.num_prompts], len(prompts) - len(fit)


def _facts(pair: Pair, prompts: list[list[int]], left_out: int, options: dict[str, Any]) -> dict[str, Any]:
    target, lengths = pair.engine.target, [len(prompt) for prompt in prompts]
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "model": pair.name,
        "hardware": hardware(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
        "prompts": {
            "file": options["prompts"],
            "count": len(prompts),
            "left_out": left_out,
            "shortest": min(lengths),
            "longest": max(lengths),
        },
        "options": options,
    }


def _head(facts: dict[str, Any], options: CompareOptions, writing: GenerationOptions) -> list[str]:
    prompts = facts["prompts"]
    return [
        f"{facts['model']}, {facts['dtype']}, {facts['hardware']}",
        f"{prompts['count']} prompts of {prompts['shortest']} to {prompts['longest']} tokens, "
        f"{prompts['left_out']} longer ones left out; {options.batch_size} at once, "
        f"up to {writing.max_new_tokens} new tokens each, temperature {writing.temperature:g}",
    ]


def _warm_up(ways: Sequence[_Way], batches: Sequence[list[list[int]]]) -> None:
    """Pay for what only first runs pay for, of every batch size; and refuse what cannot be decoded."""
    for way in ways:
        short = replace(way.writing, max_new_tokens=min(WARM_UP, way.writing.max_new_tokens))
        on_gpu = way.pair.engine.target.device.type == "cuda"
        for batch in {len(batch): batch for batch in batches}.values():
            way.run(batch, way.writing if on_gpu else short)


def _decode(ways: Sequence[_Way], batches: Sequence[list[list[int]]], options: CompareOptions, report: Report) -> None:
    """Each batch with every way before the next batch, so that what the machine does beside us hits all alike."""
    for repeat in range(options.repeats):
        for way in ways:
            way.runs.append([])
        for index, batch in enumerate(batches):
            report.progress(f"repeat {repeat + 1} of {options.repeats}, batch {index + 1} of {len(batches)}")
            for way in ways:
                first = index * options.batch_size  # each prompt has a seed of its own
                seed = None if way.writing.seed is None else way.writing.seed + first
                way.runs[-1].append(way.run(batch, replace(way.writing, seed=seed)))


def _result(way: _Way, plain: _Way, prompts: Sequence[Sequence[int]], options: CompareOptions) -> Result:
    stats = [run.stats for run in way.runs[0]]
    rows = max(len(run.tokens) for run in way.runs[0])
    steps, emitted = sum(each.steps for each in stats), sum(each.emitted for each in stats)
    same = near_ties = None
    differences: list[Difference] = []
    repeats = range(options.repeats)
    if way is not plain and way.exact and not options.disable_output_comparison:
        found = [way.texts(repeat) for repeat in repeats]
        differences = find_differences(plain.pair, plain.writing, prompts, plain.texts(), found)
        same, near_ties = len(prompts) - len(differences), sum(each.near_tie for each in differences)
    return Result(
        way=way.pair.way,
        name=way.pair.drafts,
        shape=shape(way.pair.engine.proposer_for(rows)) if way.pair.way in WAYS else None,
        tokens=sum(map(len, way.texts())),
        seconds=statistics.median(map(way.seconds, repeats)),
        tokens_per_second=statistics.median(map(way.speed, repeats)),
        speedup=statistics.median(way.speed(repeat) / plain.speed(repeat) for repeat in repeats),
        steps=steps,
        drafted=sum(each.drafted for each in stats),
        accepted=sum(each.accepted for each in stats),
        tokens_per_step=emitted / steps if steps else 0.0,
        accepted_by_depth=[sum(depth) for depth in zip_longest(*(s.accepted_by_depth for s in stats), fillvalue=0)],
        same=same,
        near_ties=near_ties,
        first_difference=next(((each.prompt, each.token) for each in differences if not each.near_tie), None),
        differences=differences,
    )


def _cells(result: Result, prompts: int) -> tuple[Any, ...]:
    kept = f"{result.accepted / result.drafted:.0%}" if result.drafted else None
    ties = f", {result.near_ties} near-ties" if result.near_ties else ""
    same = None if result.same is None else f"{result.same} of {prompts}{ties}"
    return result.way, result.tokens_per_second, result.speedup, result.tokens_per_step, kept, same
