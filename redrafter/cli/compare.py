"""`redrafter compare`: ways of drafting side by side, their outputs compared token by token."""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from redrafter.bench.divergence import first_difference
from redrafter.bench.facts import hardware, versions
from redrafter.bench.prompts import encode, read_prompts
from redrafter.bench.report import Report
from redrafter.checkpoint import holds_drafter, load_tokenizer
from redrafter.cli.engines import DRAFT_MODEL, DRAFTER, LOOKUP, check_flags, drafts_by, load_engine, shape
from redrafter.cli.loading import Pair, Run, checked
from redrafter.cli.options import CompareOptions, DraftOptions, GenerationOptions, LoadOptions, read_options
from redrafter.errors import ArgumentError

__all__ = ["run"]

PLAIN = "plain"
WARM_UP = 8  # new tokens of the runs on a CPU that pay for what only first runs pay; a GPU captures whole ones
COLUMNS = (("", 14), ("tokens/s", 9), ("x plain", 8), ("tokens/step", 12), ("drafts kept", 12), ("same outputs", 13))


@dataclass(frozen=True)
class Result:
    """One way. seconds: of all prompts, the median over repeats. speedup: over plain decoding, the median of the
    repeats' own ratios of tokens/s. same: outputs equal to plain decoding's, None where that is not promised or not
    asked; first_difference: prompt and new token of the first that is not."""

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
    first_difference: tuple[int, int] | None


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

    @property
    def texts(self) -> list[list[int]]:
        return [row for run in self.runs[0] for row in run.tokens]


def run(args: argparse.Namespace) -> int:
    """Refuse what cannot be compared, then decode batch by batch with each way in turn."""
    options, writing = read_options(CompareOptions, args), read_options(GenerationOptions, args)
    if writing.sampling and writing.seed is None:
        writing = replace(writing, seed=0)  # all ways draw the same
    load, draft = read_options(LoadOptions, args), read_options(DraftOptions, args)
    texts = read_prompts(options.prompts)
    pairs = _load(*checked(load, draft))
    prompts, left_out = _fitting(encode(texts, pairs[0].tokenizer), options)
    report = _open(pairs[0], prompts, left_out, load, draft, options, writing)
    plain = _Way(replace(pairs[0], way=PLAIN, drafts=None), replace(writing, speculate=False))
    ways = [plain, *(_Way(pair, writing) for pair in pairs)]
    _decode(ways, prompts, options, report)
    table, same = report.table("", COLUMNS), True
    for way in ways:
        exact = way.pair.way != DRAFT_MODEL or draft.acceptance != "rejection" or not writing.sampling
        result = _result(way, plain, options, compared=way is not plain and exact)
        same = same and result.first_difference is None
        report.add("ways", result)
        table.row(*_cells(result, len(prompts)))
        if result.first_difference is not None:
            prompt, token = result.first_difference
            report.line(f"  OTHER TOKENS, first in prompt {prompt + 1} at new token {token + 1}")
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


def _fitting(prompts: list[list[int]], options: CompareOptions) -> tuple[list[list[int]], int]:
    """The prompts to write on from, and how many were too long."""
    most = options.max_input_len
    fit = [prompt for prompt in prompts if most is None or len(prompt) <= most]
    if not fit:
        raise ArgumentError(f"no prompt has {most} tokens or fewer: raise --max-input-len")
    return fit[: options.num_prompts], len(prompts) - len(fit)


def _open(
    pair: Pair,
    prompts: list[list[int]],
    left_out: int,
    load: LoadOptions,
    draft: DraftOptions,
    options: CompareOptions,
    writing: GenerationOptions,
) -> Report:
    target = pair.engine.target
    facts: dict[str, Any] = {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "model": pair.name,
        "hardware": hardware(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": versions(),
        "prompts": {"file": options.prompts, "count": len(prompts), "left_out": left_out},
        "options": asdict(load) | asdict(draft) | asdict(writing) | asdict(options),
    }
    report = Report(facts, path=None if options.out is None else Path(options.out))
    lengths = [len(prompt) for prompt in prompts]
    report.line(
        f"{pair.name}, {facts['dtype']}, {facts['hardware']}\n{len(lengths)} prompts of {min(lengths)} to "
        f"{max(lengths)} tokens, {left_out} longer ones left out; {options.batch_size} at once, up to "
        f"{writing.max_new_tokens} new tokens each, temperature {writing.temperature:g}"
    )
    return report


def _decode(ways: Sequence[_Way], prompts: list[list[int]], options: CompareOptions, report: Report) -> None:
    """Each batch with every way before the next batch, so that what the machine does beside us hits all alike."""
    size = options.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    for way in ways:
        report.progress(f"{way.pair.way}: the first run")
        short = replace(way.writing, max_new_tokens=min(WARM_UP, way.writing.max_new_tokens))
        on_gpu = way.pair.engine.target.device.type == "cuda"
        for batch in {len(batch): batch for batch in batches}.values():
            way.pair.run(batch, way.writing if on_gpu else short, streamer=None)
    for repeat in range(options.repeats):
        for way in ways:
            way.runs.append([])
        for index, batch in enumerate(batches):
            report.progress(f"repeat {repeat + 1} of {options.repeats}, batch {index + 1} of {len(batches)}")
            for way in ways:
                seed = None if way.writing.seed is None else way.writing.seed + index * size  # each prompt has its own
                way.pair.engine.forget_prefixes()
                way.runs[-1].append(way.pair.run(batch, replace(way.writing, seed=seed), streamer=None))


def _result(way: _Way, plain: _Way, options: CompareOptions, *, compared: bool) -> Result:
    stats = [run.stats for run in way.runs[0]]
    steps, emitted = sum(each.steps for each in stats), sum(each.emitted for each in stats)
    same = first = None
    if compared and not options.disable_output_comparison:
        differences = [first_difference(*pair) for pair in zip(plain.texts, way.texts, strict=True)]
        same = differences.count(None)
        first = next(((row, at) for row, at in enumerate(differences) if at is not None), None)
    repeats = range(options.repeats)
    return Result(
        way=way.pair.way,
        name=way.pair.drafts,
        shape=shape(way.pair.engine.proposer_for(options.batch_size)) if way is not plain else None,
        tokens=sum(map(len, way.texts)),
        seconds=statistics.median(map(way.seconds, repeats)),
        tokens_per_second=statistics.median(map(way.speed, repeats)),
        speedup=statistics.median(way.speed(repeat) / plain.speed(repeat) for repeat in repeats),
        steps=steps,
        drafted=sum(each.drafted for each in stats),
        accepted=sum(each.accepted for each in stats),
        tokens_per_step=emitted / steps if steps else 0.0,
        accepted_by_depth=[sum(depth) for depth in zip_longest(*(s.accepted_by_depth for s in stats), fillvalue=0)],
        same=same,
        first_difference=first,
    )


def _cells(result: Result, prompts: int) -> tuple[Any, ...]:
    kept = f"{result.accepted / result.drafted:.0%}" if result.drafted else None
    same = None if result.same is None else f"{result.same} of {prompts}"
    return result.way, result.tokens_per_second, result.speedup, result.tokens_per_step, kept, same
