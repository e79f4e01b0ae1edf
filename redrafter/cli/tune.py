"""`redrafter tune`: find the best tree shape for each batch size, and write a tuning file for `from_pretrained`."""

import argparse
import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from redrafter.app.flags import read_options
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.bench.options import TuneOptions
from redrafter.bench.plot import draw_tuning
from redrafter.bench.tuner import DEEPER_LENGTHS, LENGTHS, Tuner, candidates, choose, table
from redrafter.drafting.estimates import SHARING_ROWS
from redrafter.drafting.proposer import SearchProposer
from redrafter.engine.redrafter import ReDrafter
from redrafter.engine.step_timing import measure_step_costs
from redrafter.engine.tuning import Tuning, measured_on, tuning_path
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import format_table, versions
from redrafter.measure.run import Workload

CPU_BATCH_SIZES = (1, 2, 4)
GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = {
    "tokens/step": "tokens_per_step",
    "step ms": "step_ms",
    "x plain": "step_cost",
    "tokens/s": "tokens_per_second",
    "plain tokens/s": "plain_tokens_per_second",
    "ratio": "ratio",
}


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: choose the fastest tree for each batch size, print them, and write the tuning file."""
    options = read_options(TuneOptions, args)
    prompts = read_prompts(options.prompts)
    pair = Pair.load(replace(read_options(LoadOptions, args), tuning="none"))
    engine, proposer = pair.engine, pair.engine.proposer
    assert isinstance(engine, ReDrafter)
    assert isinstance(proposer, SearchProposer)
    sizes = options.batch_sizes or (CPU_BATCH_SIZES if engine.target.device.type == "cpu" else GPU_BATCH_SIZES)
    share = engine.target.varlen.ok and max(sizes) >= SHARING_ROWS
    trees = candidates(proposer, options.beams, options.lengths or LENGTHS, share=share)
    if not trees:
        raise ArgumentError(f"the drafter's vocabulary is smaller than --beams {min(options.beams)}")
    work = Workload.from_options(engine, pair.tokenizer, encode(prompts, pair.tokenizer, **options.cut), options)
    tuner = Tuner(work, sizes, options.seconds, lambda line: print(line, file=sys.stderr, flush=True))
    tuner.measure_trees(trees, () if options.lengths else DEEPER_LENGTHS)
    shapes = choose(tuner.timings)
    rows = table(tuner.timings, shapes)
    pair_facts: dict[str, Any] = {**measured_on(engine.target, engine.drafter)}
    tuning = Tuning(
        shapes,
        **pair_facts,
        versions={name: version for name, version in versions().items() if version},
        costs=measure_step_costs(engine.open_memory(), proposer) if engine.target.varlen.ok else None,
        step_costs={row["batch"]: round(row["step_cost"], 3) for row in rows if row["shape"] is not None},
        prompts=Path(options.prompts or "prompts.jsonl").name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        measured=tuple(timing.to_dict() for timing in tuner.timings),
    )
    path = Path(options.out) if options.out else tuning_path(engine.target, engine.drafter)
    tuning.write(path)
    cells = ((row["batch"], shapes[row["batch"]] or "off", *map(row.get, COLUMNS.values())) for row in rows)
    lines = format_table(["batch", "shape", *COLUMNS], cells, indent="")
    print(*lines, sep="\n", file=sys.stderr if args.json else sys.stdout)
    print(f"written to {path}", file=sys.stderr)
    if options.plot is not None:
        name = f"{Path(pair.name).name} on {tuning.device}, {tuning.dtype}"
        draw_tuning(tuner.timings, shapes, name, Path(options.plot))
        print(f"drawn in {options.plot}", file=sys.stderr)
    if args.json:
        names = {"model": pair.name, "drafter": pair.drafting_model}
        print(json.dumps(names | {"file": str(path), "table": rows, "tuning": tuning.to_dict()}))
    return 0
