"""`redrafter bench`: measure a pair on a workload, and print a report."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from redrafter.app.flags import flag, read_options
from redrafter.app.loading import NO_DRAFT_OPTIONS, Pair, check_options
from redrafter.app.options import LoadOptions, SuiteOptions
from redrafter.app.templates import require_template
from redrafter.bench.options import BenchOptions
from redrafter.bench.padded_model import SHAPES, describe, pad_drafter, pad_model, unmasked
from redrafter.bench.sections import run_sections
from redrafter.bench.suite import run_suite
from redrafter.checkpoints.models import quantize_drafter, quantize_model
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.suites import Dialogues, Suite, read_suite
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Names, Report, facts, head
from redrafter.measure.run import Workload
from redrafter.measure.suite_table import LEGEND
from redrafter.model.target import Target
from redrafter.parallel.launched import launched_processes, process_rank

# Options that do not apply to a suite: they select other prompts, or measure something other than speed.
NOT_OF_SUITES = frozenset(
    {"prompts", "prompt_share", "prompt_tokens", "waves", "context", "against", "assistant_model"}
)
NOT_OF_SUITES |= {"draft_vocab_sizes", "plots"}
SHIPPED_PROMPTS = "those that ship"


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: validate the options, run the measurements and print the report."""
    options, load = read_options(BenchOptions, args), read_options(LoadOptions, args)
    asked = read_options(SuiteOptions, args)
    asked.refuse_others(args, NOT_OF_SUITES)
    if launched_processes() > 1:
        for name in ("pad_to", "against"):
            if vars(options)[name]:
                raise ArgumentError(
                    f"{flag(name)} measures a model in one process: leave it out, or start it without torchrun"
                )
        if process_rank() > 0:  # rank 0 alone writes files
            options, asked = replace(options, json=None, plots=None), replace(asked, csv=None, markdown=None)
    if options.pad_to is not None and options.pad_to not in SHAPES:
        raise ArgumentError(f"--pad-to knows {', '.join(SHAPES)}, got {options.pad_to!r}")
    suite = _read_suite(args, asked, options.seed)
    rows = read_prompts(options.prompts) if suite is None else []
    pair = Pair.load(load) if options.pad_to is None else _padded(load, options)
    engine = pair.engine
    assert isinstance(engine, ReDrafter)
    prompts = encode(rows, pair.tokenizer, **options.cut)
    work = Workload.from_options(engine, pair.tokenizer, prompts, options, options.num_prompts)
    if suite is not None:
        require_template(pair.tokenizer, pair.name)
        questions = [question for some in suite.categories.values() for question in some]
        first = Dialogues(questions, pair.tokenizer, work.most_prompt_tokens).next_prompts()
        if not first:
            raise ArgumentError(
                f"--suite {asked.suite}: no question leaves room for --max-new-tokens {options.max_new_tokens} in the "
                f"{work.most_prompt_tokens + options.max_new_tokens} tokens of a text: lower it"
            )
        work = replace(work, prompts=first, ends=end_tokens(engine.model, pair.tokenizer))
    work.check()
    least, most = engine.shape.num_beams or 1, engine.target.vocab_size
    for ids in options.draft_vocab_sizes:
        if not least <= ids <= most:
            raise ArgumentError(f"--draft-vocab-sizes must be from num_beams={least} to {most} ids, got {ids}")
    at_once = max(engine.options.max_batch_size, *options.batch_sizes)  # do not split a large batch into several
    engine.options = replace(engine.options, max_batch_size=at_once)
    note = None if options.pad_to is None else describe(options.pad_to, Path(pair.name).name)
    prompts_name = asked.suite or options.prompts or SHIPPED_PROMPTS
    names = Names(model=pair.name, drafter=pair.drafting_model, prompts=prompts_name, padded=note)
    known = facts(work, names, asdict(load) | asdict(options))
    report = Report(known, path=options.json, note=note)
    report.line(*head(known))
    if suite is None:
        run_sections(report, work, options)
    else:
        report.line(str(suite), LEGEND)
        run_suite(report, work, suite, pair.tokenizer, options, [*head(known), str(suite)], asked)
    return report.finish()


def _read_suite(args: argparse.Namespace, asked: SuiteOptions, seed: int) -> Suite | None:
    """Return the selected questions of `--suite`; None without that option."""
    if asked.suite is None:
        return None
    # The default of --num-prompts applies to other prompts; a suite is measured on all its questions.
    return read_suite(asked.suite).choose(vars(args).get("num_prompts"), seed)


def _padded(load: LoadOptions, options: BenchOptions) -> Pair:
    """Load a small pair on the CPU, and pad it to the cost of a large model on the device."""
    assert options.pad_to is not None
    _, load, _ = check_options(load, NO_DRAFT_OPTIONS)
    # The small pair is only copied into the padded one, which is quantized afterwards.
    unquantized = replace(load, device="cpu", quantization=None, draft_quantization=None)
    pair, shape = Pair.load(unquantized), SHAPES[options.pad_to]
    device, small = str(load.device), pair.engine
    assert isinstance(small, ReDrafter)
    if not isinstance(small.drafter, RecurrentDrafter):
        raise UnsupportedError("--pad-to pads recurrent drafters alone, and this is none: leave it out")
    drafter = pad_drafter(
        small.drafter, shape.hidden_size, shape.vocab_size, head_rank=options.pad_head_rank, device=device
    )
    model = pad_model(small.model, shape, device=device)
    if load.quantization is not None:
        quantize_model(model, options.pad_to)
    if load.draft_quantization is not None:
        quantize_drafter(drafter)
    with unmasked(model):
        target = Target(model)
    pair.engine = ReDrafter(target, drafter, small.shape, options=small.options)
    return pair
