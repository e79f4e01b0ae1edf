"""`redrafter bench`: load a pair, measure it on a workload, and report; with --url, measure servers instead."""

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path

from redrafter.app.flags import flag, read_options
from redrafter.app.loading import NO_DRAFT_OPTIONS, Pair, check_options
from redrafter.app.options import LoadOptions
from redrafter.bench.options import BenchOptions, ServerOptions
from redrafter.bench.padded_model import SHAPES, describe, pad_drafter, pad_model, unmasked
from redrafter.bench.suite import run_suite
from redrafter.checkpoints.quantization import quantize_drafter, quantize_model
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.cli import bench_server
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.engine.recurrent import ReDrafter
from redrafter.engine.tuning import find_tuning
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.atomic_file import check_writable
from redrafter.files.checkpoint_kind import check_path
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Report, check_picture, facts, head
from redrafter.measure.run import Workload
from redrafter.parallel.launched import launched_processes, process_rank
from redrafter.target.target import Target

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Run the command: check the options, load the pair, measure, print the report."""
    if hasattr(args, "url"):
        if launched_processes() > 1:
            raise ArgumentError("--url measures servers from one process: start it without torchrun")
        return bench_server.run(args)
    _refuse_server_options(args)
    options, load = read_options(BenchOptions, args), read_options(LoadOptions, args)
    if launched_processes() > 1:
        options = _shared(options)
    if options.pad_to is not None and options.pad_to not in SHAPES:
        raise ArgumentError(f"--pad-to knows {', '.join(SHAPES)}, got {options.pad_to!r}")
    if options.plots is not None:
        check_picture(Path(options.plots), "--plots", folder=True)
    if options.assistant_model:
        check_path(options.assistant_model)
    if options.json is not None:
        check_writable(Path(options.json), "--json")
    rows = read_prompts(options.prompts)
    pair = Pair.load(load) if options.pad_to is None else _padded(load, options)
    engine = pair.engine
    assert isinstance(engine, ReDrafter)
    work = Workload.of(
        engine,
        pair.tokenizer,
        prompts=encode(rows, pair.tokenizer, **options.cut),
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    _check_draft_vocab_sizes(engine, options)
    most = max(engine.options.max_batch_size, *options.batch_sizes)  # a batch is measured at once, however large
    engine.options = replace(engine.options, max_batch_size=most)
    note = None if options.pad_to is None else describe(options.pad_to, Path(pair.name).name)
    names = {
        "model": pair.name,
        "drafter": pair.drafting_model,
        "padded": note,
        "prompts": options.prompts or "those that ship",
    }
    known = facts(work, names, asdict(load) | asdict(options))
    report = Report(known, path=None if options.json is None else Path(options.json), note=note)
    report.line(*head(known))
    run_suite(report, work, options)
    return report.finish()


def _shared(options: BenchOptions) -> BenchOptions:
    """Return the options of one of several processes that share a model, of which rank 0 alone writes files."""
    for name in ("pad_to", "against"):
        if getattr(options, name):
            raise ArgumentError(
                f"{flag(name)} measures a model in one process: leave it out, or start it without torchrun"
            )
    return options if process_rank() == 0 else replace(options, json=None, plots=None)


def _refuse_server_options(args: argparse.Namespace) -> None:
    for item in fields(ServerOptions):
        if hasattr(args, item.name):
            raise ArgumentError(f"{flag(item.name)} is for --url: give that too")


def _padded(load: LoadOptions, options: BenchOptions) -> Pair:
    """Load a small pair on the CPU, and return it padded to the cost of a large model on the device."""
    assert options.pad_to is not None
    _, load, _ = check_options(load, NO_DRAFT_OPTIONS)
    unquantized = replace(load, device="cpu", tuning="none", quantization=None, draft_quantization=None)
    pair, shape = Pair.load(unquantized), SHAPES[options.pad_to]
    device, small = str(load.device), pair.engine
    assert isinstance(small, ReDrafter)
    if not isinstance(small.drafter, RecurrentDrafter):
        raise UnsupportedError("--pad-to pads recurrent drafters alone, and this is an EAGLE-3 head: leave it out")
    drafter = pad_drafter(
        small.drafter, shape.hidden_size, shape.vocab_size, head_rank=options.pad_head_rank, device=device
    )
    model = pad_model(small.model, shape, device=device)
    if load.quantization is not None:
        quantize_model(model, options.pad_to, quantization=load.quantization)
    if load.draft_quantization is not None:
        quantize_drafter(drafter, load.draft_quantization)
    with unmasked(model):
        target = Target(model)
    typed = TreeShape(load.num_beams, load.draft_len_per_beam, load.node_budget)
    tuning = None if load.tuning == "none" or typed != TreeShape() else find_tuning(load.tuning, target, drafter)
    pair.engine = ReDrafter(target, drafter, small.shape, options=small.options, tuning=tuning)
    return pair


def _check_draft_vocab_sizes(engine: ReDrafter, options: BenchOptions) -> None:
    for ids in options.draft_vocab_sizes:
        least, most = engine.shape.num_beams or 1, engine.target.vocab_size
        if not least <= ids <= most:
            raise ArgumentError(f"--draft-vocab-sizes must be from num_beams={least} to {most} ids, got {ids}")
